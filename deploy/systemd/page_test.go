package systemd

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write docs/units.md")

// unitOptions has each option of the units, in the order of the page, with what it does here.
var unitOptions = []struct {
	section string
	options [][2]string
}{
	{"Start and order", [][2]string{
		{"Description", "name in `systemctl status`"},
		{"Documentation", "links in `systemctl status`"},
		{"Wants", "units that are started too"},
		{"After", "units that start before"},
		{"PartOf", "stops and restarts with that target"},
		{"WantedBy", "the target that starts the unit once it is enabled"},
		{"DefaultInstance", "instance of `systemctl enable` without a number"},
		{"Type", "active when the process reports that `/readyz` answers 200"},
		{"NotifyAccess", "reports of other processes are ignored"},
		{"User", "account; `tandem.sysusers` creates it"},
		{"Group", "group of the account"},
		{"Environment", "settings of an instance: GPU, name, ports; a crash ends by SIGABRT, so that it is restarted"},
		{"EnvironmentFile", "settings of one instance; `-`: the file may be missing"},
		{"ExecStart", "the command"},
	}},
	{"Restart, stop and watchdog", [][2]string{
		{"Restart", "after a crash, a signal or the watchdog"},
		{"RestartSec", "time before a restart"},
		{"RestartPreventExitStatus", "status of a wrong setting, which no restart can help"},
		{"TimeoutStartSec", "a start may take as long as weights or nodes need"},
		{"TimeoutStopSec", "time of a drain before SIGKILL; keep it above `shutdown-timeout`"},
		{"TimeoutAbortSec", "time for a dump of goroutines when the watchdog acts"},
		{"WatchdogSec", "silence after which the process counts as hanging"},
	}},
	{"Limits", [][2]string{
		{"LimitNOFILE", "file descriptors: two for each client of a gateway at most"},
		{"LimitMEMLOCK", "locked memory: RDMA registers the KV pool"},
		{"LimitCORE", "no core dumps, which have prompts"},
		{"MemoryMax", "memory of the unit, of the machine's"},
		{"OOMScoreAdjust", "the kernel ends other processes first"},
	}},
	{"Sandbox", [][2]string{
		{"DevicePolicy", "no devices but pseudo devices and those of `DeviceAllow`"},
		{"DeviceAllow", "devices of NVIDIA's and InfiniBand's drivers"},
		{"PrivateDevices", "no hardware devices"},
		{"PrivateTmp", "a `/tmp` of its own"},
		{"PrivateUsers", "no other accounts"},
		{"NoNewPrivileges", "no setuid programs"},
		{"CapabilityBoundingSet", "no capabilities"},
		{"AmbientCapabilities", "none for child processes"},
		{"ProtectSystem", "the file system is read-only"},
		{"ProtectHome", "folders below `/home`: hidden from gateways, readable for nodes, which may have models there"},
		{"ProtectProc", "other accounts' processes are hidden"},
		{"ProcSubset", "only processes in `/proc`"},
		{"ProtectKernelTunables", "`/proc/sys` and `/sys` are read-only"},
		{"ProtectKernelModules", "no loading of modules"},
		{"ProtectKernelLogs", "no kernel log"},
		{"ProtectControlGroups", "cgroups are read-only"},
		{"ProtectClock", "no setting of the clock"},
		{"ProtectHostname", "no setting of the host name"},
		{"RestrictAddressFamilies", "sockets; `AF_NETLINK` lists the machine's addresses"},
		{"RestrictNamespaces", "no namespaces"},
		{"RestrictRealtime", "no real-time scheduling"},
		{"RestrictSUIDSGID", "no setuid or setgid files"},
		{"LockPersonality", "no other execution domain"},
		{"MemoryDenyWriteExecute", "no memory that is writable and executable; nodes need it for GPU drivers"},
		{"SystemCallArchitectures", "system calls of the machine's architecture only"},
		{"SystemCallFilter", "groups of allowed system calls; `~`: of refused ones"},
		{"UMask", "new files are readable for the account only"},
	}},
	{"Socket", [][2]string{
		{"ListenStream", "address of clients, instead of `host` and `port`"},
		{"FileDescriptorName", "name by which the gateway finds the listener"},
		{"Backlog", "connections that wait during a restart"},
		{"NoDelay", "small writes leave at once"},
	}},
}

// units are the columns of the page.
var units = []string{"tandem-gateway.service", "tandem-prefill@.service", "tandem-decode@.service", "tandem-gateway.socket", "tandem.target"}

// readUnit returns the values of each option, in the order of the file.
func readUnit(t *testing.T, name string) map[string][]string {
	t.Helper()
	text, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	values := map[string][]string{}
	for line := range strings.Lines(string(text)) {
		line = strings.TrimSpace(line)
		if line == "" || line[0] == '#' || line[0] == '[' {
			continue
		}
		option, value, ok := strings.Cut(line, "=")
		if !ok {
			t.Fatalf("%s: %q is no option", name, line)
		}
		values[option] = append(values[option], value)
	}
	return values
}

// unitsPage returns docs/units.md.
func unitsPage(t *testing.T) []byte {
	t.Helper()
	of := map[string]map[string][]string{}
	left := map[string]bool{} // options without a row
	for _, unit := range units {
		of[unit] = readUnit(t, unit)
		for option := range of[unit] {
			left[option] = true
		}
	}
	var b bytes.Buffer
	b.WriteString(`# Options of the systemd units

This page is made from the units in ` + "`deploy/systemd`" + `:
` + "`go test -run TestUnitsPage ./deploy/systemd -update`" + ` writes it.
[Run under systemd](systemd.md) explains how to use them.

Change an option with ` + "`systemctl edit UNIT`" + `, which keeps it through upgrades of the package.
Settings of the program belong into its YAML or ` + "`.env`" + ` file. A value without a unit's name is
that of all units that have the option.
`)
	for _, s := range unitOptions {
		fmt.Fprintf(&b, "\n## %s\n\n| option | value | meaning |\n|---|---|---|\n", s.section)
		for _, o := range s.options {
			if !left[o[0]] {
				t.Errorf("no unit has %s, or it has two rows", o[0])
			}
			delete(left, o[0])
			fmt.Fprintf(&b, "| `%s` | %s | %s |\n", o[0], strings.ReplaceAll(valuesOf(of, o[0]), "|", `\|`), o[1])
		}
	}
	for option := range left {
		t.Errorf("%s has no row in unitOptions", option)
	}
	return b.Bytes()
}

// valuesOf returns the values of an option, each with the units that have it.
func valuesOf(of map[string]map[string][]string, option string) string {
	var texts []string
	have := map[string][]string{} // units, by text
	for _, unit := range units {
		values, ok := of[unit][option]
		if !ok {
			continue
		}
		for i, v := range values {
			if values[i] = "`" + v + "`"; v == "" {
				values[i] = "empty"
			}
		}
		text := strings.Join(values, ", ")
		if !slices.Contains(texts, text) {
			texts = append(texts, text)
		}
		name := strings.TrimSuffix(strings.TrimPrefix(unit, "tandem-"), ".service")
		have[text] = append(have[text], name)
	}
	if len(texts) == 1 {
		return texts[0]
	}
	for i, text := range texts {
		texts[i] = strings.Join(have[text], ", ") + ": " + text
	}
	return strings.Join(texts, "; ")
}

// docs/units.md has every option of the units.
func TestUnitsPage(t *testing.T) {
	const path = "../../docs/units.md"
	want := unitsPage(t)
	if *update {
		if err := os.WriteFile(path, want, 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	got, err := os.ReadFile(path)
	if err != nil || !bytes.Equal(got, want) {
		t.Errorf("docs/units.md is not current (%v); `go test -run TestUnitsPage ./deploy/systemd -update` writes it", err)
	}
}
