#!/bin/sh
# Makes the account and the folders of the units. Units are neither enabled nor restarted: a node
# that restarts moves its streams, which is for the operator to time.
set -e
if [ -d /run/systemd/system ]; then
	systemd-sysusers tandem.conf
	systemd-tmpfiles --create tandem.conf
	systemctl daemon-reload
elif command -v systemd-sysusers >/dev/null; then
	systemd-sysusers tandem.conf
	systemd-tmpfiles --create tandem.conf || true
fi
