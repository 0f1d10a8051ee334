#!/bin/bash
# The entry of the service: `bash server.sh`, or of the container, which finds it as /config/server.sh.
set -euo pipefail
cd "$(dirname "$0")"
exec energonai service init --config_file=opt_config.py
