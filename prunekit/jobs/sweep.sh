
# PATH RESUME COMMAND...: runs a command until it has printed its result into PATH.json
tried() {
    local path=$1 resume=$2 code try
    shift 2
    for ((try = 0; try <= retries; try++)); do
        [ -s "$path.json" ] && return 0
        if [ "$resume" = yes ] && [ -e "$path.log" ]; then set -- "$@" --resume auto; resume=no; fi
        "$@" > "$path.json" 2> "$path.log"
        code=$?
        [ -s "$path.json" ] && return 0
        grep -q 'prunekit: error: ' "$path.log" || echo "prunekit: error: ended with exit code $code" >> "$path.log"
        [ $code = 2 ] && break # wrong usage
    done
    return 1
}

# PART OPTION...: submits a part of this script, and prints the number of its job
submit() {
    local part=$1 job
    shift
    job=$(sbatch --parsable --job-name="prunekit-$part" --output="${script%/*}/$part-%j.out" "$@" "$script" "$part") &&
        echo "${job%%;*}"
}

case ${1:-} in
shared) shared ;;
trial) trial "$SLURM_ARRAY_TASK_ID" ;;
compare) compare ;;
*)
    first=$(submit shared "${options[@]}" "$@") &&
        trials=$(submit trial --array="$array" --requeue --dependency="afterok:$first" "${options[@]}" "$@") &&
        submit compare --dependency="afterany:$trials" "${options[@]}" "$@"
    ;;
esac
