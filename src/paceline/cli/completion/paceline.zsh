#compdef paceline
# Completion of paceline for zsh:  paceline --show-completion zsh
_paceline() {
    local -a found
    found=(${(f)"$("${words[1]}" --complete "${(@)words[2,CURRENT]}" 2> /dev/null)"})
    if (( $#found )); then
        compadd -S '' -- ${(M)found:#*=}
        compadd -- ${found:#*=}
    else
        compset -P '*='
        _files
    fi
}
if [[ $funcstack[1] == _paceline ]]; then
    _paceline "$@"
else
    compdef _paceline paceline
fi
