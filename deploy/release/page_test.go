package main

import (
	"bytes"
	"flag"
	"fmt"
	"maps"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write docs/container.md")

// containerOptions has each setting of the images with what it does, by the name of its field, and
// for Env and Labels by the name of the variable or label.
var containerOptions = [][2]string{
	{"User", "number of the account and its group; `runAsNonRoot` accepts it"},
	{"Entrypoint", "the arguments of a container are those of `tandem`"},
	{"WorkingDir", "folder of relative paths"},
	{"StopSignal", "drains the process; give the container more time than `--shutdown-timeout`"},
	{"PATH", "where the program is"},
	{"TANDEM_LOG_FORMAT", "log lines for programs; `text` for people"},
	{"NVIDIA_VISIBLE_DEVICES", "GPUs that NVIDIA's container toolkit adds"},
	{"NVIDIA_DRIVER_CAPABILITIES", "libraries of the driver that the toolkit adds"},
	{"org.opencontainers.image.title", "name"},
	{"org.opencontainers.image.version", "release"},
	{"org.opencontainers.image.source", "source code"},
	{"org.opencontainers.image.licenses", "licence"},
}

// containerPage returns docs/container.md.
func containerPage(t *testing.T) []byte {
	t.Helper()
	c := containerConfig("VERSION")
	kinds, values := map[string]string{}, map[string]string{}
	for _, e := range c.Env {
		name, v, _ := strings.Cut(e, "=")
		kinds[name], values[name] = "variable", v
	}
	for _, name := range slices.Sorted(maps.Keys(c.Labels)) {
		kinds[name], values[name] = "label", c.Labels[name]
	}
	c.Env, c.Labels = nil, nil
	for v, i := reflect.ValueOf(c), 0; i < v.NumField(); i++ {
		if name := v.Type().Field(i).Name; !v.Field(i).IsZero() {
			kinds[name], values[name] = "setting", strings.Trim(fmt.Sprint(v.Field(i)), "[]")
		}
	}
	var b bytes.Buffer
	b.WriteString(`# Options of the container images

This page is made from ` + "`deploy/release`" + `:
` + "`go test -C deploy/release -run TestContainerPage . -update`" + ` writes it.
[Install](install.md#packages) has the images.

` + "```sh" + `
podman run --rm --read-only --cap-drop all --stop-timeout 60 -p 8000:8000 -v ~/models/m:/model:ro \
  tandem:VERSION serve /model --host 0.0.0.0 --insecure
` + "```" + `

The program's settings are its flags, and variables such as ` + "`TANDEM_MAX_NUM_SEQS`" + `. A node
writes nothing but the cache of ` + "`--download`" + `: mount a folder that user 65532 may write, and
name it in ` + "`HF_HUB_CACHE`" + `. RDMA needs the devices below ` + "`/dev/infiniband`" + ` and
` + "`--ulimit memlock=-1`" + `.

| option | kind | value | meaning |
|---|---|---|---|
`)
	for _, o := range containerOptions {
		if kinds[o[0]] == "" {
			t.Errorf("the images have no %s, or it has two rows", o[0])
		}
		fmt.Fprintf(&b, "| `%s` | %s | `%s` | %s |\n", o[0], kinds[o[0]], values[o[0]], o[1])
		delete(kinds, o[0])
	}
	for name := range kinds {
		t.Errorf("%s has no row in containerOptions", name)
	}
	return b.Bytes()
}

// docs/container.md has every setting of the images.
func TestContainerPage(t *testing.T) {
	const path = "../../docs/container.md"
	want := containerPage(t)
	if *update {
		if err := os.WriteFile(path, want, 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	got, err := os.ReadFile(path)
	if err != nil || !bytes.Equal(got, want) {
		t.Errorf("docs/container.md is not current (%v); `go test -C deploy/release -run TestContainerPage . -update` writes it", err)
	}
}
