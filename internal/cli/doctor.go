package cli

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"github.com/tandem-serving/tandem/engine/backend/cpu"
	"github.com/tandem-serving/tandem/engine/backend/cuda"
	"github.com/tandem-serving/tandem/internal/config"
	"github.com/tandem-serving/tandem/internal/console"
	"github.com/tandem-serving/tandem/internal/doctor"
	"github.com/tandem-serving/tandem/internal/obs/logs"
	"github.com/tandem-serving/tandem/internal/process"
	"github.com/tandem-serving/tandem/internal/regular"
	"github.com/tandem-serving/tandem/kvtransfer/fabric"
)

const (
	doctorTimeout = time.Minute
	maxPart       = 8 << 20 // bytes of one file of a bundle
)

// errProblems ends a doctor that found problems: status 1.
var errProblems = errors.New("of the checks found problems")

// portFlags are the flags of the roles with ports.
var portFlags = []string{"port", "gossip-port", "nats-port", "rpc-port", "kv-port", "http-port"}

// examine checks the machine and, with --url, a fleet.
func examine(v *Invocation) error {
	roles := v.StringSlice("role", nil, "roles whose ports and settings are checked, such as gateway,decode: a port that is taken is then a problem; default: gateway, prefill and decode, where it is a warning")
	v.HostVar(new(string), "host", "address whose ports are checked, as the roles get it by --host; default: that of their settings")
	dirs := v.StringSlice("tls-dir", nil, "folders made by tandem ca, whose certificates are checked")
	gateway := new(string)
	gatewayURL(v, gateway, "gateway whose nodes are tried")
	key := v.String("api-key", "", "its bearer token")
	v.Secret("api-key")
	v.String("settings", "", "configuration file of the roles, which they get by --config")
	asJSON := v.Bool("json", false, "as one JSON object")
	bundle := v.String("bundle", "", "file to write for a bug report, .tar.gz: these results, versions, settings and metrics, without secrets")
	if _, err := v.Parse(0); err != nil {
		return err
	}
	needed := len(*roles) > 0
	if !needed {
		*roles = []string{"gateway", "prefill", "decode"}
	}
	ports, folders, err := v.settingsOf(*roles)
	if err != nil {
		return err
	}
	if len(*dirs) == 0 {
		*dirs = folders
	}
	signalled, _, stop := process.Signals()
	defer stop()
	ctx, cancel := context.WithTimeout(signalled, doctorTimeout)
	defer cancel()
	system := os.DirFS("/")
	client := &http.Client{Timeout: 10 * time.Second}
	lines := doctor.Run(ctx, doctor.Options{
		System: system, Now: time.Now(), Kernels: cpu.Variants(), Descriptors: descriptors, MemoryLimit: process.MemoryLimit(system),
		Ports: ports, PortsNeeded: needed, TLSDirs: *dirs, Fabric: fabrics, GPU: firstGPU, URL: *gateway, Key: *key, HTTP: client,
	})
	if signalled.Err() != nil { // checks that it cut short are no problems
		return context.Cause(signalled)
	}
	for i := range lines {
		lines[i].Figure = logs.WithoutPackages(lines[i].Figure)
	}
	if *asJSON {
		err = doctor.JSON(v.Out, v.Version, lines)
	} else {
		err = doctor.Text(v.Out, lines)
	}
	if err != nil {
		return err
	}
	if *bundle != "" {
		c := &console.Client{URL: *gateway, Key: *key, HTTP: client}
		if err := v.writeBundle(ctx, *bundle, *roles, lines, c); err != nil {
			return fmt.Errorf("--bundle: %w", err)
		}
		fmt.Fprintf(v.ErrOut, "%s has the report; look into it before you send it\n", *bundle)
	}
	if n := doctor.Count(lines, doctor.Problem); n > 0 {
		return fmt.Errorf("%d %w", n, errProblems)
	}
	return nil
}

func descriptors() (limit, clients int, err error) {
	if limit, err = process.DescriptorLimit(); err != nil {
		return 0, 0, err
	}
	clients, err = process.GatewayDescriptors.Clients(limit)
	return limit, clients, err
}

// fabrics opens each of libfabric's providers and closes it again.
func fabrics() (found []string, err error) {
	for _, name := range fabric.Providers {
		d, openErr := fabric.Open(fabric.Options{Provider: name})
		if openErr != nil {
			err = openErr
			continue
		}
		found = append(found, d.Info().String())
		if err := d.Close(); err != nil {
			return found, err
		}
	}
	return found, err
}

func firstGPU() (name string, total, free int64, err error) {
	d, err := cuda.Probe("", 0)
	return d.Name, d.Total, d.Free, err
}

// settingsOf returns the ports of roles and their folders of certificates, by the defaults, the
// environment, --settings and --host.
func (v *Invocation) settingsOf(roles []string) (all []doctor.Port, folders []string, err error) {
	taken := map[string]bool{}
	for _, role := range roles {
		if !slices.Contains([]string{"gateway", "prefill", "decode", "serve"}, role) {
			return nil, nil, fmt.Errorf("%w: --role %q: want gateway, prefill, decode or serve", config.ErrValue, role)
		}
		set, err := v.resolved(v.Table.Find(role))
		if err != nil {
			advice := ""
			if len(roles) > 1 {
				advice = "; --role names the roles that --settings is for"
			}
			return nil, nil, fmt.Errorf("%w: the settings of tandem %s: %s%s", config.ErrValue, role, strings.ReplaceAll(strings.TrimPrefix(err.Error(), config.ErrValue.Error()+": "), "\n"+config.ErrValue.Error()+": ", "; "), advice)
		}
		if f := set.Lookup("tls-dir"); f != nil && f.Value.String() != "" && !slices.Contains(folders, f.Value.String()) {
			folders = append(folders, f.Value.String())
		}
		host := "127.0.0.1"
		for _, s := range []*config.Set{set, v.Set} { // doctor's own flag comes last
			if f := s.Lookup("host"); f != nil && f.Value.String() != "" {
				host = f.Value.String()
			}
		}
		for _, name := range portFlags {
			f := set.Lookup(name)
			if f == nil || name == "kv-port" && role == "prefill" {
				continue
			}
			n, err := strconv.Atoi(f.Value.String())
			if err != nil || taken[host+" "+f.Value.String()] && n != 0 {
				continue
			}
			taken[host+" "+f.Value.String()] = true
			all = append(all, doctor.Port{Role: role, Flag: name, Host: host, Number: n, UDP: name == "gossip-port"})
		}
	}
	return all, folders, nil
}

// resolved returns the flags of a command with the values of the environment and --settings.
func (v *Invocation) resolved(c *Command) (*config.Set, error) {
	set := c.Declared(v.Table)
	set.Siblings(v.Table.flagNames())
	set.SkipChecks()
	return set, set.Resolve(v.configArgs(), v.Environ)
}

// configArgs passes --settings to a role.
func (v *Invocation) configArgs() []string {
	if f := v.Lookup("settings"); f != nil && f.Value.String() != "" {
		return []string{"--config", f.Value.String()}
	}
	return nil
}

// settings returns what `tandem ROLE --dry-run` prints, which leaves secrets out.
func (v *Invocation) settings(role string) []byte {
	var out bytes.Buffer
	c := v.Table.Find(role)
	err := c.Run(&Invocation{
		Set: c.Flags(&out), Arguments: append(v.configArgs(), "--dry-run"), Environ: v.Environ, Version: v.Version, Out: &out, ErrOut: &out, Table: v.Table, unchecked: true,
	})
	if err != nil && !errors.Is(err, config.ErrDryRun) {
		fmt.Fprintf(&out, "# %v\n", err)
	}
	return out.Bytes()
}

// writeBundle writes the parts of a bug report, each without secrets.
func (v *Invocation) writeBundle(ctx context.Context, path string, roles []string, lines []doctor.Line, c *console.Client) error {
	hide := v.secrets(c)
	var version, text, object bytes.Buffer
	if err := errors.Join(
		showVersion(&Invocation{Set: config.New("version", "", "", io.Discard), Arguments: []string{"--json"}, Version: v.Version, Out: &version, ErrOut: io.Discard, Table: v.Table}),
		doctor.Text(&text, lines), doctor.JSON(&object, v.Version, lines)); err != nil {
		return err
	}
	type part struct {
		name string
		text []byte
	}
	parts := []part{{"version.json", version.Bytes()}, {"doctor.txt", text.Bytes()}, {"doctor.json", object.Bytes()}}
	for _, role := range roles {
		parts = append(parts, part{"config/" + role + ".yaml", v.settings(role)})
	}
	if c.URL != "" {
		for _, p := range []struct{ name, path string }{{"metrics.txt", "/metrics"}, {"nodes.json", "/debug/nodes"}} {
			b, err := get(ctx, c, p.path)
			if err != nil {
				b = []byte(err.Error() + "\n")
			}
			parts = append(parts, part{p.name, b})
		}
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	z := gzip.NewWriter(f)
	t := tar.NewWriter(z)
	for _, p := range parts {
		b := hide.hide(p.text)
		err = errors.Join(err, t.WriteHeader(&tar.Header{Name: "tandem-report/" + p.name, Mode: 0o600, Size: int64(len(b)), ModTime: time.Now()}))
		if err == nil {
			_, err = t.Write(b)
		}
	}
	return errors.Join(err, t.Close(), z.Close(), f.Close())
}

// get returns the body of a route of the gateway, at most maxPart bytes.
func get(ctx context.Context, c *console.Client, path string) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, strings.TrimSuffix(c.URL, "/")+path, nil)
	if err != nil {
		return nil, err
	}
	if c.Key != "" {
		req.Header.Set("Authorization", "Bearer "+c.Key)
	}
	resp, err := c.HTTP.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	return io.ReadAll(io.LimitReader(resp.Body, maxPart))
}

// leastSecret is the length from which on a value of another program's environment is hidden.
const leastSecret = 8

// hidden are texts that a bundle may not have.
type hidden struct{ values []string }

var (
	secretName  = regexp.MustCompile(`(?i)key|token|secret|passw|credential|auth`)
	secretShape = regexp.MustCompile(`(?s:-----BEGIN [A-Z ]*PRIVATE KEY-----.*?-----END [A-Z ]*PRIVATE KEY-----)` +
		`|(?i:\b(?:bearer|basic)[ +][A-Za-z0-9._~+/=-]{4,})` +
		`|\b(?:hf_|sk-|ghp_|xox[bap]-)[A-Za-z0-9_-]{8,}` +
		`|sha256:[0-9a-fA-F]{64}`)
	secretInURL = regexp.MustCompile(`://[^/@\s"']+@`)
)

// secrets collects what this process knows to be secret: the key given, values of secret flags, the
// lines of --api-key-file and --response-key-file, and environment variables of other programs
// whose names look like it.
func (v *Invocation) secrets(c *console.Client) *hidden {
	h := new(hidden)
	h.add(c.Key)
	for _, e := range v.Environ {
		name, value, _ := strings.Cut(e, "=")
		if secretName.MatchString(name) && !strings.HasPrefix(name, "TANDEM_") && len(value) >= leastSecret {
			h.add(value)
		}
	}
	for i := range v.Table {
		set, err := v.resolved(&v.Table[i])
		if err != nil {
			continue // such a command's settings are not in the bundle either
		}
		set.VisitAll(func(f *pflag.Flag) {
			values := []string{f.Value.String()}
			if several, ok := f.Value.(pflag.SliceValue); ok {
				values = several.GetSlice()
			}
			switch {
			case (f.Name == "api-key-file" || f.Name == "response-key-file") && values[0] != "":
				h.addFile(values[0])
			case set.IsSecret(f.Name):
				for _, value := range values {
					h.add(value)
				}
			}
		})
	}
	return h
}

// addFile hides the keys of a file, the first word of each line.
func (h *hidden) addFile(path string) {
	b, err := regular.ReadFile(path, maxPart)
	if err != nil {
		return
	}
	for line := range strings.Lines(string(b)) {
		if words := strings.Fields(line); len(words) > 0 {
			h.add(words[0])
		}
	}
}

// add hides a value. Shorter ones would hide common words.
func (h *hidden) add(value string) {
	if value = strings.TrimSpace(value); len(value) >= 4 && !slices.Contains(h.values, value) {
		h.values = append(h.values, value)
	}
}

func (h *hidden) hide(text []byte) []byte {
	for _, v := range h.values {
		text = bytes.ReplaceAll(text, []byte(v), []byte("[secret]"))
	}
	text = secretInURL.ReplaceAll(text, []byte("://[secret]@"))
	return secretShape.ReplaceAll(text, []byte("[secret]"))
}
