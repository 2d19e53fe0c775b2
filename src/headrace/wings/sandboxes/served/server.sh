# The server of a session: it runs the session's commands one at a time, and holds them to their limits. It needs bash 5,
# GNU coreutils, grep, tar and setsid, and nothing of Headrace.
#
#   bash -c "$(< server.sh)" server LIFE PROCESSES MEMORY
#
# LIFE: microseconds until it ends. PROCESSES, MEMORY: limits of all of the session together, the latter in bytes.
#
# A request is a line, and bytes:  run NONCE SIZE WORDS WALL OUTPUT CPU MEMORY FILE OPEN | count NONCE | end NONCE
#   the bytes: a directory, WORDS arguments and variables, each with a zero byte at its end, then the standard input
# An answer is a line, and bytes:  NONCE REASON STATUS SIGNALLED CPU SIZES... | NONCE NUMBER
# The end of the input ends it. As the first process of a container it takes everything along.

first=$(env -0 | base64 -w 0)
export LC_ALL=C
life=$1 most_processes=$2 most_memory=$3
place=/dev/shm/.headrace-$$
page=4096
declare -a present=() command=()
declare -A spared=() before=()
number=0 memory=0 reason='' nonce='' partial=''
trap : PIPE TERM HUP INT QUIT
defaults=--default-signal # no command inherits a signal that the starter of the server ignores; since coreutils 8.31
env "$defaults" true 2> /dev/null || defaults=''

now() { # the time in microseconds, in $now
  now=${EPOCHREALTIME/[.,]/}
}

pause() { # wait for some seconds
  read -r -t "$1" -u "$never"
}

fields_of() { # the fields of a process from its state on, in $fields
  local line=''
  { IFS= read -r -d '' line < "/proc/$1/stat"; } 2> /dev/null
  fields=(${line##*) })
  ((${#fields[@]} > 21))
}

look() { # the processes of the session, the number of their threads, and their memory in bytes
  local path fields
  present=() number=0 memory=0
  for path in /proc/[0-9]*; do
    fields_of "${path#/proc/}" || continue
    [[ ${fields[0]} == [ZX] || ${fields[3]} == "$own" ]] && continue
    ((fields[19] < began)) || [[ ${before[${path#/proc/}]} == "${fields[19]}" ]] && continue # it was there before
    present+=("${path#/proc/}")
    ((number += fields[17], memory += fields[21] * page))
  done
}

finish() { # end all processes that are not spared
  local round pid left
  for round in {1..100}; do
    look
    left=()
    for pid in "${present[@]}"; do [[ ${spared[$pid]} ]] || left+=("$pid"); done
    ((${#left[@]})) || return
    kill -STOP "${left[@]}" 2> /dev/null
    kill -KILL "${left[@]}" 2> /dev/null
    pause 0.003
  done
  kill -KILL -- -1 # they fork faster than they are ended
}

collect() { # write the input to a file of limited size
  ulimit -f "$2"
  exec dd bs=65536 status=none of="$place/$1" 2> /dev/null
}

next_event() { # wait for a line of events, at most some seconds; in $event, empty if none has come
  local part=''
  event=''
  IFS= read -r -t "$1" -u "$events" part
  local code=$?
  partial+=$part
  ((code == 0)) && event=$partial partial=''
}

keep() { # run the command to its end, and tell how it ended
  trap 'jobs > "$place/ended"' CHLD
  set +m
  (
    trap - PIPE TERM HUP INT QUIT CHLD
    exec 0<&"$in" 1>&"$out" 2>&"$err" 99>&"$state"
    exec {in}<&- {out}>&- {err}>&- {state}>&- {events}>&- {never}>&- {asked}<&-
    ulimit -S -c 0
    ulimit -f $((limits[4] / 1024)) -n "${limits[5]}" -v $((limits[3] / 1024))
    ulimit -S -t "${limits[2]}"
    ulimit -H -t $((limits[2] + 1))
    until cd -- "$directory" 2> /dev/null; do
      [[ $directory == / ]] && break
      directory=${directory%/*}
      directory=${directory:-/}
    done
    exec setsid env -i $defaults -- "${command[@]}"
  ) &
  wait $!
  local status=$? times ended signalled=0
  times > "$place/times"
  { read -r _; read -r times; } < "$place/times"
  ended=$(< "$place/ended")
  [[ $ended == *' Exit '* || $ended == *' Done '* ]] || signalled=1
  echo "ended $status $signalled ${times// /+}" >&"$events"
}

run() { # run a command: SIZE WORDS WALL OUTPUT CPU MEMORY FILE OPEN
  local size=$1 words=$2 limits=("${@:3}") event ended='' until pid keeper readers=()
  local in out err state directory most
  mkdir -p "$place" && rm -f "$place"/*
  : > "$place/out" > "$place/err" > "$place/state" # a command may end the readers before they have made their files
  head -c "$size" <&"$asked" > "$place/in"
  exec {in}< "$place/in"
  mapfile -d '' -n $((words + 1)) -t -u "$in" command
  directory=${command[0]} command=("${command[@]:1}") reason=''
  most=$((limits[1] / 1024 + 2))
  exec {out}> >(collect out "$most") && readers+=($!)
  exec {err}> >(collect err "$most") && readers+=($!)
  exec {state}> >(collect state 1024)
  readers+=($!)
  look
  spared=()
  for pid in "${present[@]}"; do spared[$pid]=1; done
  now
  until=$((now + limits[0]))
  set -m
  keep < /dev/null &
  keeper=$!
  set +m
  while [[ ! $ended ]]; do
    next_event 0.03
    [[ $event ]] && ended=$event && break
    alive "$keeper" || [[ -s $place/times ]] || { ended='ended 137 1 0' && break; } # it was killed, with all
    alive "${readers[0]}" && alive "${readers[1]}" || reason=${reason:-output}
    watch_together
    now
    ((now >= until)) && reason=${reason:-wall_time}
    [[ $reason ]] && finish
    read -r -t 0 -u "$asked" && exit # nobody asks while a command runs: the client has gone
  done
  for pid in "$out" "$err" "$state"; do printf '\n%s\n' "$nonce" >&"$pid"; done 2> /dev/null
  exec {in}<&- {out}>&- {err}>&- {state}>&-
  drained out "${readers[0]}"
  drained err "${readers[1]}"
  drained state "${readers[2]}"
  kill -KILL "${readers[@]}" 2> /dev/null
  answer_run ${ended#ended}
}

alive() { # whether a process runs
  kill -0 "$1" 2> /dev/null
}

drained() { # wait until the file of a reader has the mark, or the reader has ended
  local round
  for round in {1..2000}; do
    grep -q -a -F -x "$nonce" "$place/$1" 2> /dev/null && return
    alive "$2" || return
    pause 0.002
  done
}

answer_run() { # send the result: STATUS SIGNALLED CPU
  local data=("$place/out" "$place/err" "$place/state")
  printf '%s %s %s %s %s %s\n' "$nonce" "${reason:-exited}" "${1:-137}" "${2:-1}" "${3:-0}" "$(sizes "${data[@]}")"
  cat "${data[@]}"
  rm -rf "$place"
}

sizes() { # the sizes of files, in one line
  local sizes
  mapfile -t sizes < <(stat -c %s "$@")
  echo "${sizes[*]}"
}

watch_together() { # end all of the session, if it exceeds its limits together
  look
  local exceeded=''
  ((memory > most_memory)) && exceeded=memory
  ((number > most_processes)) && exceeded=processes
  [[ $exceeded ]] || return
  reason=${reason:-$exceeded}
  spared=()
  finish
}

serve() { # carry out requests until the input ends
  local line part wait code ended
  while :; do
    line='' part=''
    while :; do
      now
      ((now >= deadline)) && exit
      wait=1
      ((number)) && wait=0.05
      IFS= read -r -t "$wait" -u "$asked" part
      code=$?
      line+=$part
      ((code == 0)) && break
      ((code > 128)) || exit
      watch_together
    done
    set -- $line
    nonce=$2
    case $1 in
      run) run "${@:3}" ;;
      count)
        look
        echo "$nonce ${#present[@]}"
        ;;
      end)
        look
        ended=${#present[@]} spared=()
        finish
        echo "$nonce $ended"
        ;;
    esac
  done
}

for program in dd grep cat head env setsid mkdir rm stat tar base64; do
  command -v "$program" > /dev/null || { echo "- $program"; exit 1; }
done
((BASH_VERSINFO[0] >= 5)) || { echo '- bash 5'; exit 1; }
while read -r word size _; do
  [[ $word == KernelPageSize: ]] && page=$((size * 1024)) && break
done < /proc/self/smaps
fields_of "$$"
own=${fields[3]} began=${fields[19]}
for path in /proc/[0-9]*; do # also what a service has put beside the server since, such as the ends of its channel
  fields_of "${path#/proc/}" && before[${path#/proc/}]=${fields[19]}
done
((own == $$)) || exec setsid bash -c "$BASH_EXECUTION_STRING" server "$@"
[[ -w / ]] || chmod u+w / 2> /dev/null # podman takes this right from its owner, who has no other one here
now
deadline=$((now + life))
exec {asked}<&0 {events}<> <(:) {never}<> <(:) < /dev/null
echo "+ $first $(command -v bash) $(command -v cat) $(command -v mkdir) $(command -v tar)"
serve
