#!/usr/bin/env bash
# Starts this node's kvstored unless one already serves. Configuration: KVSTORE_* or KVSTORE_CONFIG.
set -euo pipefail
cd "$(dirname "$0")/.."
if .venv/bin/kvctl status >/dev/null 2>&1; then
  echo "kvstored is already running" >&2
  exit 0
fi
# A wrong setting is one line here, at once, rather than in the log.
.venv/bin/kvstored config print >/dev/null
log=${KVSTORED_LOG:-${XDG_STATE_HOME:-$HOME/.local/state}/headgate/kvstored.log}
mkdir -p "$(dirname "$log")"
# setsid: the daemon must not end with the shell or the Ray process that started it.
setsid --fork .venv/bin/kvstored </dev/null >>"$log" 2>&1
for _ in $(seq 100); do
  .venv/bin/kvctl status >/dev/null 2>&1 && exit 0
  sleep 0.1
done
echo "kvstored did not start within 10 s; its log is $log:" >&2
tail -n 5 "$log" >&2
exit 1
