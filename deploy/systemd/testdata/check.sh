#!/bin/bash
# Runs as a unit in a booted container, and writes one line for each check: "ok NAME" or
# "not ok NAME: REASON". The package is in /root/tandem.deb.
exec 3>/result

check() { # name, command
	local name=$1 out
	shift
	if out=$("$@" 2>&1); then echo "ok $name" >&3; else echo "not ok $name: ${out//$'\n'/ | }" >&3; fi
}
until_ok() { # seconds, command
	local end=$((SECONDS + $1))
	shift
	until "$@" >/dev/null 2>&1; do
		((SECONDS < end)) || { echo "not within the time: $*"; "$@"; return 1; }
		sleep .1
	done
}
chat() { curl -sf -m 20 http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' -d '{"model":"tandem-builtin","prompt":"Hi","max_tokens":4}' | grep -q '"text"'; }
is() { [ "$(systemctl show -p "$2" --value "$1")" = "$3" ] || { systemctl status --no-pager "$1"; return 1; }; }
restarts() { systemctl show -p NRestarts --value "$1"; }

check install dpkg -i /root/tandem.deb
check account getent passwd tandem
check certificates tandem ca /etc/tandem/tls gateway/gateway node/node
systemd-tmpfiles --create tandem.conf
check key-of-authority-stays-with-root bash -c '! runuser -u tandem -- test -r /etc/tandem/tls/ca.key && runuser -u tandem -- test -r /etc/tandem/tls/node/node.key'

# Shorter times, so that the watchdog acts within the test.
for u in tandem-gateway.service tandem-prefill@0.service tandem-decode@0.service; do
	mkdir -p /etc/systemd/system/$u.d
	printf '[Service]\nWatchdogSec=3s\n' >/etc/systemd/system/$u.d/test.conf
	echo 'TANDEM_KV_CACHE_MEMORY_BYTES=64MiB' >/etc/tandem/prefill-0.env
	echo 'TANDEM_KV_CACHE_MEMORY_BYTES=64MiB' >/etc/tandem/decode-0.env
done
systemctl daemon-reload

check start-decode systemctl start tandem-decode@0 --no-block
check start-prefill systemctl start tandem-prefill@0 --no-block
# The unit is active only when the gateway serves: the start itself waits for the nodes.
check start-gateway timeout 60 systemctl start tandem-gateway
check gateway-serves chat
check decode-is-ready until_ok 30 is tandem-decode@0 ActiveState active
check prefill-is-ready until_ok 30 is tandem-prefill@0 ActiveState active
check status-text until_ok 10 is tandem-gateway StatusText serving

systemctl kill -s KILL tandem-gateway
check killed-gateway-restarts until_ok 30 bash -c '[ "$(systemctl show -p NRestarts --value tandem-gateway)" = 1 ]'
check chat-after-restart until_ok 30 chat

systemctl kill -s STOP tandem-decode@0
check watchdog-restarts-stopped-node until_ok 30 bash -c '[ "$(systemctl show -p NRestarts --value tandem-decode@0)" -ge 1 ]'
check chat-after-watchdog until_ok 60 chat

# A long stream, and a stop while it runs: the stream ends whole and the unit without failure.
curl -sN http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \
	-d '{"model":"tandem-builtin","prompt":"Once","max_tokens":1500,"ignore_eos":true,"stream":true}' >/stream &
stream=$!
until_ok 20 test -s /stream
check stop-gateway systemctl stop tandem-gateway
wait $stream
check stream-ended-whole bash -c 'tail -c 100 /stream | grep -q "\[DONE\]"'
check stop-is-no-failure is tandem-gateway Result success

# New connections wait in the socket while the gateway restarts.
systemctl enable --now tandem-gateway.socket >/dev/null 2>&1
check socket-starts-gateway until_ok 60 chat
(
	refused=0 asked=0
	while [ ! -e /stop-asking ]; do
		asked=$((asked + 1))
		curl -s -o /dev/null -m 60 http://127.0.0.1:8000/livez
		case $? in 0 | 52 | 56) ;; *) refused=$((refused + 1)) ;; esac
	done
	echo "$asked $refused" >/asked
) &
asking=$!
systemctl restart tandem-gateway
touch /stop-asking
wait $asking
check no-connection-refused-while-restarting bash -c 'read -r asked refused </asked; echo "$asked asked, $refused refused"; [ "$asked" -gt 2 ] && [ "$refused" = 0 ]'

systemctl stop tandem-gateway.socket tandem-gateway
echo 'no-such-setting: 1' >>/etc/tandem/gateway.yaml
systemctl start tandem-gateway 2>/dev/null
sleep 3
check wrong-setting-is-not-retried is tandem-gateway NRestarts 0
check wrong-setting-fails is tandem-gateway ExecMainStatus 2

check upgrade-keeps-settings bash -c 'dpkg -i --force-confold /root/tandem.deb && grep -q no-such-setting /etc/tandem/gateway.yaml'
check nodes-run-through-an-upgrade is tandem-decode@0 ActiveState active
check remove dpkg -r tandem
check removal-stops-units until_ok 10 bash -c '! pgrep -x tandem'
check purge dpkg -P tandem
check nothing-is-left bash -c 'left=$(find /etc /usr /var/lib -path /var/lib/systemd -prune -o -name "*tandem*" -not -path "*.service.d*" -print | grep -v "/etc/systemd/system/tandem"); echo "$left"; [ -z "$left" ] && ! getent passwd tandem'
journalctl --no-pager -u 'tandem-*' >/journal 2>&1
echo end >&3
systemctl poweroff --force
