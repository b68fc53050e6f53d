//go:build deploy && linux

package kube

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

const (
	adminToken = "admin-token"
	apiURL     = "https://127.0.0.1:6443"
	// readyBound is how long the control plane may take to answer.
	readyBound = 2 * time.Minute
)

// Options are the options of a cluster.
type Options struct {
	Nodes     []string
	Capacity  corev1.ResourceList // of each node, in addition to CPU and memory
	Image     func(reference string) (Image, error)
	Endpoints time.Duration // until new connections see a change of endpoints
}

// Cluster is a running control plane with its nodes.
type Cluster struct {
	Client  kubernetes.Interface
	Config  *rest.Config
	Started time.Duration // from the start of the first process until the API server was ready

	dir     string // files of the control plane, and below pods/ of pods
	bin     string
	kubelet *kubelet
	names   *services
}

// Programs returns the folder with the programs of Kubernetes, or skips the test.
func Programs(t *testing.T) string {
	t.Helper()
	dir := os.Getenv("TANDEM_KUBERNETES")
	if dir == "" {
		t.Skip("needs TANDEM_KUBERNETES, the folder of kube-apiserver and others: make test-deploy builds them")
	}
	return dir
}

// Start starts a cluster, which ends with the test.
func Start(t *testing.T, o Options) *Cluster {
	t.Helper()
	c := &Cluster{bin: Programs(t), dir: t.TempDir()}
	if err := os.Chmod(c.dir, 0o755); err != nil {
		t.Fatal(err)
	}
	begun := time.Now()
	c.startControlPlane(t)
	c.Config = &rest.Config{Host: apiURL, BearerToken: adminToken, TLSClientConfig: rest.TLSClientConfig{Insecure: true}, QPS: 500, Burst: 1000}
	client, err := kubernetes.NewForConfig(c.Config)
	if err != nil {
		t.Fatal(err)
	}
	c.Client = client
	c.Until(t, readyBound, "the API server is ready", func() error {
		return client.Discovery().RESTClient().Get().AbsPath("/readyz").Do(t.Context()).Error()
	})
	c.Started = time.Since(begun)
	c.startNodes(t, o)
	return c
}

// startControlPlane starts its four processes.
func (c *Cluster) startControlPlane(t *testing.T) {
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	public, err := x509.MarshalPKIXPublicKey(&key.PublicKey)
	if err != nil {
		t.Fatal(err)
	}
	c.write(t, "accounts.key", pem.EncodeToMemory(&pem.Block{Type: "RSA PRIVATE KEY", Bytes: x509.MarshalPKCS1PrivateKey(key)}))
	c.write(t, "accounts.pub", pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: public}))
	c.write(t, "tokens.csv", []byte(adminToken+`,admin,admin,"system:masters"`+"\n"))
	c.write(t, "kubeconfig", []byte(`apiVersion: v1
kind: Config
clusters: [{name: test, cluster: {server: "`+apiURL+`", insecure-skip-tls-verify: true}}]
users: [{name: admin, user: {token: `+adminToken+`}}]
contexts: [{name: test, context: {cluster: test, user: admin}}]
current-context: test
`))
	c.process(t, "etcd", "--data-dir="+c.path("etcd"), "--unsafe-no-fsync", "--log-level=warn",
		"--listen-client-urls=http://127.0.0.1:2379", "--advertise-client-urls=http://127.0.0.1:2379",
		"--listen-peer-urls=http://127.0.0.1:2380", "--initial-advertise-peer-urls=http://127.0.0.1:2380", "--initial-cluster=default=http://127.0.0.1:2380")
	// A Node would be tainted until the node controller, which is not run, has seen its heartbeat.
	c.process(t, "kube-apiserver", "--etcd-servers=http://127.0.0.1:2379", "--secure-port=6443", "--bind-address=0.0.0.0", "--advertise-address="+hostAddress,
		"--cert-dir="+c.path("api"), "--service-cluster-ip-range="+serviceNetwork, "--service-account-issuer=https://kubernetes.default.svc",
		"--service-account-key-file="+c.path("accounts.pub"), "--service-account-signing-key-file="+c.path("accounts.key"), "--token-auth-file="+c.path("tokens.csv"),
		"--authorization-mode=Node,RBAC", "--disable-admission-plugins=TaintNodesByCondition", "--allow-privileged")
	c.Until(t, readyBound, "the API server has a certificate", func() error { _, err := os.Stat(c.APICertificate()); return err })
	c.process(t, "kube-controller-manager", "--kubeconfig="+c.path("kubeconfig"), "--authentication-skip-lookup", "--leader-elect=false", "--cert-dir="+c.path("controllers"),
		"--service-account-private-key-file="+c.path("accounts.key"), "--root-ca-file="+c.APICertificate(), "--kube-api-qps=300", "--kube-api-burst=600",
		"--horizontal-pod-autoscaler-sync-period=1s",
		"--controllers="+strings.Join([]string{"deployment-controller", "replicaset-controller", "statefulset-controller", "job-controller", "cronjob-controller",
			"endpointslice-controller", "horizontal-pod-autoscaler-controller", "disruption-controller", "serviceaccount-controller",
			"root-ca-certificate-publisher-controller", "namespace-controller", "garbage-collector-controller"}, ","))
	c.process(t, "kube-scheduler", "--kubeconfig="+c.path("kubeconfig"), "--authentication-skip-lookup", "--leader-elect=false", "--cert-dir="+c.path("scheduler"))
}

// APICertificate returns the file of the API server's certificate, which is its own authority.
func (c *Cluster) APICertificate() string { return c.path("api/apiserver.crt") }

func (c *Cluster) path(name string) string { return filepath.Join(c.dir, name) }

func (c *Cluster) write(t *testing.T, name string, text []byte) {
	t.Helper()
	if err := os.WriteFile(c.path(name), text, 0o600); err != nil {
		t.Fatal(err)
	}
}

// process starts a program of the control plane, whose log the test shows if it fails.
func (c *Cluster) process(t *testing.T, name string, args ...string) {
	t.Helper()
	log, err := os.Create(c.path(name + ".log"))
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(filepath.Join(c.bin, name), args...)
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	t.Cleanup(func() {
		select {
		case err := <-ended:
			t.Errorf("%s ended before the test: %v", name, err)
		default:
			_ = cmd.Process.Signal(syscall.SIGKILL) // nothing of it is kept
			<-ended
		}
		log.Close()
		if t.Failed() {
			t.Logf("== %s\n%s", name, tailOf(c.path(name+".log"), 3000))
		}
	})
}

func tailOf(path string, bytes int) []byte {
	text, _ := os.ReadFile(path) // missing: empty
	return text[max(0, len(text)-bytes):]
}

// startNodes starts the nodes and what serves names and addresses of Services.
func (c *Cluster) startNodes(t *testing.T, o Options) {
	ctx, cancel := context.WithCancel(context.Background())
	var log lockedLog
	shared := informers.NewSharedInformerFactory(c.Client, 0)
	c.kubelet = &kubelet{client: c.Client, image: o.Image, dir: c.path("pods"), logf: log.printf}
	c.names = &services{delay: o.Endpoints, logf: log.printf}
	if err := errors.Join(c.kubelet.run(ctx, shared), c.names.run(ctx, shared)); err != nil {
		t.Fatal(err)
	}
	shared.Start(ctx.Done())
	shared.WaitForCacheSync(ctx.Done())
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("== kubelet\n%s", log.String())
			for _, p := range c.pods() {
				t.Logf("%s", p.tail(4000))
			}
		}
		cancel()
		c.kubelet.wg.Wait()
		shared.Shutdown()
	})
	for _, name := range o.Nodes {
		if err := c.kubelet.addNode(ctx, name, o.Capacity); err != nil {
			t.Fatal(err)
		}
	}
}

// pods returns the pods that run, in the order of their start.
func (c *Cluster) pods() []*pod {
	c.kubelet.mu.Lock()
	defer c.kubelet.mu.Unlock()
	var all []*pod
	for _, p := range c.kubelet.pods {
		all = append(all, p)
	}
	slices.SortFunc(all, func(a, b *pod) int { return a.serial - b.serial })
	return all
}

// Killed returns the pods that did not end within their grace, since the last call.
func (c *Cluster) Killed() []string {
	c.kubelet.mu.Lock()
	defer c.kubelet.mu.Unlock()
	kills := c.kubelet.kills
	c.kubelet.kills = nil
	return kills
}

// SpoilTokens makes the projected tokens of accounts invalid, as if they had expired, or valid
// again.
func (c *Cluster) SpoilTokens(spoil bool) { c.kubelet.spoilTokens.Store(spoil) }

// Names makes the DNS server know the names of Services, or none.
func (c *Cluster) Names(known bool) { c.names.silent.Store(!known) }

// Logs returns what the pods of a namespace have written.
func (c *Cluster) Logs(namespace string) (text string) {
	for _, p := range c.pods() {
		if p.spec.Namespace == namespace {
			text += p.tail(1 << 20)
		}
	}
	return text
}

// Until waits until f succeeds, and fails the test with its last error after bound.
func (c *Cluster) Until(t *testing.T, bound time.Duration, what string, f func() error) {
	t.Helper()
	var err error
	for end := time.Now().Add(bound); time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
		if err = f(); err == nil {
			return
		}
	}
	t.Fatalf("%s: not within %s: %v", what, bound, err)
}

// Run runs kubectl or helm as an administrator and returns what it prints.
func (c *Cluster) Run(t *testing.T, name string, args ...string) string {
	t.Helper()
	out, err := c.Try(t, name, args...)
	if err != nil {
		t.Fatalf("%s %q: %v\n%s", name, args, err, out)
	}
	return out
}

// Try is Run with an error for the caller.
func (c *Cluster) Try(t *testing.T, name string, args ...string) (string, error) {
	cmd := exec.CommandContext(t.Context(), filepath.Join(c.bin, name), args...)
	cmd.Env = append(os.Environ(), "KUBECONFIG="+c.path("kubeconfig"), "HOME="+c.dir)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	err := cmd.Run()
	return out.String(), err
}

// lockedLog is a log for several goroutines.
type lockedLog struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedLog) printf(format string, args ...any) {
	l.mu.Lock()
	defer l.mu.Unlock()
	fmt.Fprintf(&l.b, time.Now().Format("15:04:05.000 ")+format+"\n", args...)
}

func (l *lockedLog) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}
