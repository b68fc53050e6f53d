#!/bin/sh
# A purge also removes the certificates, the state and the account. Debian passes "purge"; RPM has
# no such step and keeps them.
set -e
case "$1" in
purge)
	rm -rf /etc/tandem /var/lib/tandem
	if getent passwd tandem >/dev/null && command -v userdel >/dev/null; then
		userdel tandem || true
	fi
	;;
esac
if [ -d /run/systemd/system ]; then
	systemctl daemon-reload || true
fi
