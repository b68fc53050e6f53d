#!/bin/sh
# Stops the units when the package is removed, not when it is upgraded. Debian passes "remove", RPM
# the number of versions that remain.
set -e
case "$1" in
remove | 0)
	if [ -d /run/systemd/system ]; then
		systemctl stop tandem.target 'tandem-*.service' 'tandem-*.socket' || true
		systemctl disable tandem.target tandem-gateway.service tandem-gateway.socket || true
	fi
	;;
esac
