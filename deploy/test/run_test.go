package test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
)

// program returns the path of the program.
func program(t *testing.T) string {
	t.Helper()
	path := os.Getenv("TANDEM_BINARY")
	if path == "" {
		t.Skip("needs TANDEM_BINARY, the program as make build leaves it")
	}
	return path
}

// rendered renders values and decodes their objects.
func rendered(t *testing.T, values string) []object {
	t.Helper()
	objects, _, err := render(parse(t, values))
	if err != nil {
		t.Fatal(err)
	}
	for i := range objects {
		if err := decode(&objects[i]); err != nil {
			t.Fatalf("%s: %v", &objects[i], err)
		}
	}
	return objects
}

// node has what the test's machine gives a pod instead of a kubelet: its files and its address.
type node struct {
	configMaps, secrets map[string]map[string][]byte
}

func newNode(objects []object) *node {
	n := &node{configMaps: map[string]map[string][]byte{}, secrets: map[string]map[string][]byte{}}
	for i := range objects {
		if c, ok := objects[i].typed.(*corev1.ConfigMap); ok {
			n.configMaps[c.Name] = map[string][]byte{}
			for key, text := range c.Data {
				n.configMaps[c.Name][key] = []byte(text)
			}
		}
	}
	return n
}

// project writes keys of a source to a folder, as a kubelet shows them to a container.
func project(t *testing.T, source map[string][]byte, name, dir string, items []corev1.KeyToPath) {
	t.Helper()
	if len(items) == 0 {
		for key := range source {
			items = append(items, corev1.KeyToPath{Key: key, Path: key})
		}
	}
	if len(items) == 0 {
		t.Fatalf("%s has no keys", name)
	}
	for _, i := range items {
		content, ok := source[i.Key]
		if !ok {
			t.Fatalf("%s has no key %s", name, i.Key)
		}
		if err := os.WriteFile(filepath.Join(dir, i.Path), content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

// mount makes the files of a pod's volumes below root, at the paths of the container.
func (n *node) mount(t *testing.T, pod *corev1.PodTemplateSpec, c *corev1.Container, root string) {
	t.Helper()
	for _, m := range c.VolumeMounts {
		i := slices.IndexFunc(pod.Spec.Volumes, func(v corev1.Volume) bool { return v.Name == m.Name })
		v := pod.Spec.Volumes[i]
		dir := t.TempDir()
		switch {
		case v.ConfigMap != nil:
			project(t, n.configMaps[v.ConfigMap.Name], v.ConfigMap.Name, dir, v.ConfigMap.Items)
		case v.Secret != nil:
			project(t, n.secrets[v.Secret.SecretName], v.Secret.SecretName, dir, v.Secret.Items)
		case v.Projected != nil:
			for _, s := range v.Projected.Sources {
				project(t, n.secrets[s.Secret.Name], s.Secret.Name, dir, s.Secret.Items)
			}
		default:
			continue
		}
		at := filepath.Join(root, m.MountPath)
		if err := os.MkdirAll(filepath.Dir(at), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink(filepath.Join(dir, m.SubPath), at); err != nil {
			t.Fatal(err)
		}
	}
}

// command returns the command of a container, with the files below root, and its environment.
func command(ctx context.Context, program, root, pod, address string, c *corev1.Container, change func(arg string) string) *exec.Cmd {
	var args []string
	for _, a := range c.Args {
		a = strings.NewReplacer("$(POD_NAME)", pod, "$(POD_IP)", address, "=/etc/tandem/", "="+root+"/etc/tandem/").Replace(a)
		if a = change(a); a != "" {
			args = append(args, a)
		}
	}
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Env = append(os.Environ(), "POD_NAME="+pod, "POD_IP="+address)
	for _, e := range c.Env {
		if e.ValueFrom == nil && e.Name != "HF_HUB_CACHE" {
			cmd.Env = append(cmd.Env, e.Name+"="+e.Value)
		}
	}
	return cmd
}

// authority returns the folders of a gateway and a node, as `tandem ca` makes them.
func authority(t *testing.T, program string) (gateway, node map[string][]byte) {
	t.Helper()
	dir := t.TempDir()
	if out, err := exec.Command(program, "ca", dir, "gateway/gateway", "node/node").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	read := func(name string) map[string][]byte {
		files := map[string][]byte{}
		entries, err := os.ReadDir(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			if files[e.Name()], err = os.ReadFile(filepath.Join(dir, name, e.Name())); err != nil {
				t.Fatal(err)
			}
		}
		return files
	}
	return read("gateway"), read("node")
}

// The program accepts the arguments and settings of each container: a dry run checks them.
func TestArguments(t *testing.T) {
	binary := program(t)
	gateway, worker := authority(t, binary)
	folder := func(from map[string][]byte, crt, key string) map[string][]byte {
		all := maps.Clone(from)
		all[crt], all[key] = from["node.crt"], from["node.key"]
		return all
	}
	names, texts := cases(t)
	for _, name := range names {
		objects := rendered(t, texts[name])
		n := newNode(objects)
		certs := folder(gateway, "gateway.crt", "gateway.key")
		maps.Copy(certs, worker)
		maps.Copy(n.secrets, map[string]map[string][]byte{
			"tandem-certs": certs, "gw": gateway, "nodes": worker, "llm-keys": {"keys": []byte("sk-a name=a\n")}, "llm-tls": folder(gateway, "tls.crt", "tls.key"),
		})
		for i := range objects {
			pod := podOf(objects[i].typed)
			if pod == nil {
				continue
			}
			// cert-manager's Secrets have other names in each case.
			for _, v := range pod.Spec.Volumes {
				if v.Projected != nil {
					for _, s := range v.Projected.Sources {
						n.secrets[s.Secret.Name] = folder(gateway, "tls.crt", "tls.key")
					}
				}
			}
			c := &pod.Spec.Containers[0]
			root := t.TempDir()
			n.mount(t, pod, c, root)
			cmd := command(t.Context(), binary, root, objects[i].Name+"-0", "127.0.0.1", c, func(arg string) string {
				if strings.HasPrefix(arg, "--model=") || strings.HasPrefix(arg, "--revision=") {
					return "" // the machine lacks the model
				}
				return strings.Replace(arg, "=k8s:embed:", "=k8s:"+namespace+"/embed:", 1) // it is no pod, which knows its namespace
			})
			cmd.Args = append(cmd.Args, "--dry-run")
			switch {
			case c.Args[0] == "ca":
				cmd.Args = append(cmd.Args, "--kubernetes-api=http://127.0.0.1:1")
			case c.Args[0] == "gateway":
				cmd.Args = append(cmd.Args, "--kubernetes-api=http://127.0.0.1:1")
			default:
				cmd.Args = append(cmd.Args, "--tensor-parallel-size=1") // the built-in model has few heads
			}
			if out, err := cmd.CombinedOutput(); err != nil {
				t.Errorf("%s: %s: %v: %q\n%s", name, &objects[i], err, cmd.Args, out)
			}
		}
	}
}

// secretAPI is a Kubernetes API with one Secret, for the Job of certificates.
type secretAPI struct {
	mu   sync.Mutex
	path string
	data map[string][]byte
}

func (a *secretAPI) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if r.URL.Path != a.path {
		w.WriteHeader(http.StatusForbidden)
		return
	}
	var o struct {
		Metadata struct {
			ResourceVersion string `json:"resourceVersion"`
		} `json:"metadata"`
		Data map[string][]byte `json:"data"`
	}
	if r.Method == http.MethodPatch {
		if err := json.NewDecoder(r.Body).Decode(&o); err != nil {
			w.WriteHeader(http.StatusBadRequest)
			return
		}
		maps.Copy(a.data, o.Data)
	}
	o.Metadata.ResourceVersion, o.Data = "1", a.data
	_ = json.NewEncoder(w).Encode(o)
}

// process is a pod's container that runs as a process.
type process struct {
	*exec.Cmd
	pod, address string
	container    *corev1.Container
	log          lockedBuffer
	ended        chan error
}

// lockedBuffer is a bytes.Buffer for several goroutines.
type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// get requests a path at a named port of the process.
func (p *process) get(port, path string) (status int, body string) {
	number := ""
	for _, c := range p.container.Ports {
		if c.Name == port {
			number = strconv.Itoa(int(c.ContainerPort))
		}
	}
	client := http.Client{Timeout: 5 * time.Second}
	resp, err := client.Get("http://" + p.address + ":" + number + path)
	if err != nil {
		return 0, err.Error()
	}
	defer resp.Body.Close()
	text, _ := io.ReadAll(resp.Body)
	return resp.StatusCode, string(text)
}

// until waits until a probe succeeds.
func (p *process) until(t *testing.T, probe *corev1.Probe) {
	t.Helper()
	at := probe.HTTPGet
	var body string
	for end := time.Now().Add(time.Minute); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		var status int
		if status, body = p.get(at.Port.StrVal, at.Path); status == 200 {
			return
		}
	}
	t.Fatalf("%s: %s: %s\n%s", p.pod, at.Path, body, p.log.String())
}

// ownNetwork runs the test in a process with a network of its own, where no other program has the
// pods' ports. It returns false in that process, and where the system refuses such a network.
func ownNetwork(t *testing.T) (done bool) {
	t.Helper()
	const marker = "TANDEM_TEST_NETWORK"
	if os.Getenv(marker) != "" {
		if err := loopbackUp(); err != nil {
			t.Fatal(err)
		}
		return false
	}
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^"+t.Name()+"$")
	cmd.Env = append(os.Environ(), marker+"=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}
	if uid := os.Getuid(); uid != 0 {
		cmd.SysProcAttr.Cloneflags |= syscall.CLONE_NEWUSER
		cmd.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: uid, Size: 1}}
	}
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Start(); err != nil {
		return false
	}
	if err := cmd.Wait(); err != nil {
		t.Fatalf("%v\n%s", err, &out)
	}
	return true
}

// loopbackUp starts the loopback interface of a new network.
func loopbackUp() error {
	s, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM, 0)
	if err != nil {
		return err
	}
	defer unix.Close(s)
	r, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}
	r.SetUint16(unix.IFF_UP)
	return unix.IoctlIfreq(s, unix.SIOCSIFFLAGS, r)
}

// A fleet of the chart's pods, as processes with addresses and files of their own: the Job makes the
// certificates, the probes succeed, a chat is answered, the pods' names are the nodes', and SIGTERM
// ends each process within its grace.
func TestFleet(t *testing.T) {
	binary := program(t)
	if ownNetwork(t) {
		return
	}
	objects := rendered(t, `
gateway: {shutdownSeconds: 5, config: {min-remote-prefill-tokens: 1}}
nodes: {shutdownSeconds: 5, config: {kv-cache-memory-bytes: 64MiB, threads: 1}}`)
	n := newNode(objects)
	var deployments []*appsv1.Deployment
	var job *batchv1.Job
	for i := range objects {
		switch o := objects[i].typed.(type) {
		case *appsv1.Deployment:
			deployments = append(deployments, o)
		case *batchv1.Job:
			job = o
		}
	}
	api := &secretAPI{path: "/api/v1/namespaces/" + namespace + "/secrets/tandem-certs", data: map[string][]byte{}}
	server := httptest.NewServer(api)
	defer server.Close()
	same := func(arg string) string { return arg }
	made := command(t.Context(), binary, "", "job", "", &job.Spec.Template.Spec.Containers[0], same)
	made.Args = append(made.Args, "--kubernetes-api", server.URL)
	if out, err := made.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	n.secrets["tandem-certs"] = api.data

	// Every address of 127.0.0.0/8 is this machine's. Gossip has no DNS here: pods join the first.
	var all []*process
	first := ""
	next := 1
	for _, d := range deployments {
		for range *d.Spec.Replicas {
			pod := fmt.Sprintf("%s-%d", d.Name, next)
			address := fmt.Sprintf("127.64.0.%d", next)
			next++
			if first == "" {
				first = address
			}
			c := &d.Spec.Template.Spec.Containers[0]
			root := t.TempDir()
			n.mount(t, &d.Spec.Template, c, root)
			p := &process{pod: pod, address: address, container: c, ended: make(chan error, 1)}
			p.Cmd = command(context.Background(), binary, root, pod, address, c, func(arg string) string {
				switch {
				case strings.HasPrefix(arg, "--join="):
					return "--join=" + first + ":7946"
				case arg == "--host=0.0.0.0": // which two gateways of one machine cannot both have
					return "--host=" + address
				}
				return arg
			})
			p.Stdout, p.Stderr = &p.log, &p.log
			if err := p.Start(); err != nil {
				t.Fatal(err)
			}
			go func() { p.ended <- p.Wait() }()
			t.Cleanup(func() { _ = p.Process.Kill() })
			all = append(all, p)
		}
	}
	gateways := 0
	for _, p := range all {
		p.until(t, p.container.StartupProbe)
		p.until(t, p.container.ReadinessProbe)
		p.until(t, p.container.LivenessProbe)
		if p.container.Args[0] == "gateway" {
			gateways++
		}
	}
	if gateways != 2 || len(all) != 5 {
		t.Fatalf("%d processes, %d of them gateways", len(all), gateways)
	}

	chat := func(host string) (int, string) {
		t.Helper()
		body := `{"messages": [{"role": "user", "content": "What is the use of a prefill node in a fleet of nodes?"}], "max_tokens": 8}`
		req, err := http.NewRequestWithContext(t.Context(), "POST", "http://"+first+":8000/v1/chat/completions", strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		req.Host = host
		req.Header.Set("Content-Type", "application/json")
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		text, _ := io.ReadAll(resp.Body)
		return resp.StatusCode, string(text)
	}
	for _, host := range []string{"tandem." + namespace, "tandem." + namespace + ".svc.cluster.local:8000"} {
		if status, text := chat(host); status != 200 || !strings.Contains(text, `"content"`) {
			t.Errorf("a chat with %s: %d %s", host, status, text)
		}
	}
	if status, _ := chat("evil.example"); status != 403 {
		t.Errorf("a chat with another Host: %d", status)
	}
	for _, p := range all {
		role := p.container.Args[0]
		nodes, known := "", role == "gateway"
		for end := time.Now().Add(20 * time.Second); !known && time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
			_, nodes = all[0].get("http", "/debug/nodes") // gossip may be on its way
			known = strings.Contains(nodes, `"`+p.pod+`"`)
		}
		if !known {
			t.Errorf("the gateway does not know %s: %s", p.pod, nodes)
		}
		_, text := p.get("http", "/metrics")
		for metric, of := range map[string]string{"\ntandem:prefill_queue_seconds ": "prefill", "\ntandem:decode_pressure ": "decode", "\ntandem:queue_length{": role} {
			if of == role && !strings.Contains(text, metric) {
				t.Errorf("%s has no metric %s", p.pod, metric)
			}
		}
	}
	// Nodes end before gateways, whose connections they wait for.
	for _, gateway := range []bool{false, true} {
		for _, p := range all {
			if (p.container.Args[0] == "gateway") == gateway {
				if err := p.Process.Signal(syscall.SIGTERM); err != nil {
					t.Fatal(err)
				}
			}
		}
		for _, p := range all {
			if (p.container.Args[0] == "gateway") != gateway {
				continue
			}
			select {
			case err := <-p.ended:
				if err != nil {
					t.Errorf("%s: %v\n%s", p.pod, err, p.log.String())
				}
			case <-time.After(20 * time.Second):
				t.Errorf("%s runs after its grace\n%s", p.pod, p.log.String())
			}
		}
	}
}
