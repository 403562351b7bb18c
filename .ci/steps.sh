# What: steps of .ci/run: each with a limit of seconds, all in a table at the end.
# Why: a run that takes too long says where its time went, and a step that hangs is named.
# Never: lets a failed step pass, or hides what a step prints.
# shellcheck shell=bash disable=SC2154
#
# Sourced, with logs set to a folder that exists: step NAME SECONDS COMMAND...
# One line a step: seconds on the clock, of the processors, of its limit; then the runners' own words.
table=() current='' background=''
cpu_seconds() {
  local f
  read -ra f <"/proc/$$/stat"
  echo $(((f[15] + f[16]) / $(getconf CLK_TCK)))
}
finish() {
  local code=$?
  [ -z "$background" ] || kill "$background" 2>/dev/null || true
  [ $code = 0 ] || [ -z "$current" ] || table+=("$(printf '%-44s failed (exit %s)' "$current" $code)")
  printf '\n== seconds: clock, processors, limit\n'
  printf '%s\n' "${table[@]}"
  printf '%-44s %5s\n' 'in all' $SECONDS
  grep -hE '^[0-9]+% tests passed|^[0-9]+ passed|^=+ .*[0-9]+ passed' "$logs"/*.log 2>/dev/null || true
  [ $code = 0 ] || echo "ci: failed in: ${current:-the start}"
}
trap finish EXIT

# step NAME LIMIT COMMAND...: the command is given LIMIT seconds.
step() {
  current=$1
  local limit=$2 began=$SECONDS cpu code=0
  cpu=$(cpu_seconds)
  shift 2
  printf '\n== %s (at %s s)\n' "$current" "$SECONDS"
  timeout --kill-after="${grace:-30}" "$limit" "$@" 2>&1 |
    timeout $((limit + 60)) tee "$logs/$((${#table[@]} + 10)).log" || code=$?  # a process left behind
  if [ $code = 124 ] || [ $code = 137 ]; then
    echo "ci: hangs: $current: no end within $limit s" && exit 1
  fi
  [ $code = 0 ] || exit $code
  table+=("$(printf '%-44s %5s %5s %5s' "$current" $((SECONDS - began)) $(($(cpu_seconds) - cpu)) "$limit")")
  current=''
}
