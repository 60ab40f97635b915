# Completion of paceline for fish:  paceline --show-completion fish
function __paceline_complete
    set --local words (commandline --tokenize --cut-at-cursor --current-process)
    set --local found ($words[1] --complete $words[2..] (commandline --current-token --cut-at-cursor) 2> /dev/null)
    if set --query found[1]
        string join \n -- $found
    else
        # A file, in KEY=FILE too.
        set --local parts (string match --regex '^([^=]*=)?(.*)$' -- (commandline --current-token --cut-at-cursor))
        string join \n -- $parts[2](__fish_complete_path $parts[3])
    end
end
complete --command paceline --no-files --arguments '(__paceline_complete)'
