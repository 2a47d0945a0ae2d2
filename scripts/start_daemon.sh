#!/usr/bin/env bash
# Starts this node's kvstored unless one already serves. Configuration: KVSTORE_* or KVSTORE_CONFIG.
set -euo pipefail
cd "$(dirname "$0")/.."
start_s=30

serves() { .venv/bin/kvctl status >/dev/null 2>&1; }

if serves; then
  echo "kvstored is already running" >&2
  exit 0
fi
# A wrong setting is one line here, at once, rather than in the log.
.venv/bin/kvstored config print >/dev/null
log=${KVSTORED_LOG:-${XDG_STATE_HOME:-${HOME:-/tmp}/.local/state}/headgate/kvstored.log}
mkdir -p "$(dirname "$log")"
# setsid: the daemon must not end with the shell or the Ray process that started it.
setsid .venv/bin/kvstored </dev/null >>"$log" 2>&1 &
daemon=$!
SECONDS=0
while kill -0 "$daemon" 2>/dev/null && [ "$SECONDS" -lt "$start_s" ]; do
  serves && exit 0
  sleep 0.1
done
kill -0 "$daemon" 2>/dev/null && why="does not serve after $start_s s" || why="has ended"
echo "kvstored $why; its log is $log:" >&2
tail -n 5 "$log" >&2
exit 1
