# Completion of paceline for bash 4.4 and later:  paceline --show-completion bash
_paceline() {
    local IFS=$' \t\n' line=${COMP_LINE:0:COMP_POINT} current
    local -a words
    read -ra words <<< "$line"
    [[ $line == *[[:space:]] ]] && words+=("")
    current=${words[-1]}
    mapfile -t COMPREPLY < <("$1" --complete "${words[@]:1}" 2> /dev/null)
    # bash takes what is behind = or : for a word of its own.
    COMPREPLY=("${COMPREPLY[@]#"${current%"${current##*[=:]}"}"}")
    if [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *= ]]; then
        compopt -o nospace
    fi
    # What is in COMPREPLY stands on the line as it is, and a folder may be called $(...).
    local number
    for number in "${!COMPREPLY[@]}"; do
        [[ -n ${COMPREPLY[number]} ]] && printf -v "COMPREPLY[$number]" %q "${COMPREPLY[number]}"
    done
}
complete -o default -F _paceline paceline
