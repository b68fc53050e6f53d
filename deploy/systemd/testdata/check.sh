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
inside() { TANDEM_INSIDE=/root/model exec /root/inside -test.count=1 -test.v -test.run "^$1\$"; }
(inside TestRequests >/asked 2>&1) &
asking=$!
sleep 1
systemctl restart tandem-gateway
sleep 1
touch /stop-asking
check no-connection-refused-while-restarting bash -c "tail --pid=$asking -f /dev/null; cat /asked; grep -q '^--- PASS: TestRequests' /asked"
cat /asked

# A model of a hub, by the settings of docs/systemd.md.
(inside TestHub >/hub 2>&1) &
hub=$!
check hub-starts until_ok 10 test -s /hub-url
for role in decode prefill; do
	SYSTEMD_EDITOR='cp /root/hub.conf' script -qec "systemctl edit tandem-$role@" /dev/null
	printf 'model: org/name\ndownload: true\n' >>/etc/tandem/$role.yaml
	(umask 077; printf 'HF_ENDPOINT=%s\nHF_TOKEN=hf_secret\n' "$(cat /hub-url)" >/hub.env; cat /hub.env >>/etc/tandem/$role-0.env)
	chmod 600 /etc/tandem/$role-0.env
done
chat_hub() { curl -sf -m 20 http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' -d '{"model":"org/name","prompt":"Hi","max_tokens":4}' | grep -q '"text"'; }
check hub-model-is-downloaded timeout 60 systemctl restart tandem-decode@0 tandem-prefill@0
check chat-of-hub-model until_ok 30 chat_hub
check hub-cache-is-the-accounts bash -c '[ "$(stat -c %U /var/cache/tandem/models--org--name)" = tandem ]'
kill $hub
sed -i 's/^download: true/download: false/' /etc/tandem/decode.yaml /etc/tandem/prefill.yaml
check hub-model-starts-from-the-cache timeout 60 systemctl restart tandem-decode@0 tandem-prefill@0
check chat-of-cached-model until_ok 30 chat_hub

systemctl stop tandem-gateway.socket tandem-gateway
# The same without a unit: the program starts at the first connection.
systemd-socket-activate -l 127.0.0.1:8001 /usr/bin/tandem gateway --config /etc/tandem/gateway.yaml >/activated 2>&1 &
activated=$!
check socket-activate bash -c 'for i in $(seq 100); do curl -sf -m 20 http://127.0.0.1:8001/livez && exit; sleep .1; done; cat /activated; exit 1'
kill $activated
until_ok 30 bash -c "! kill -0 $activated"

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
