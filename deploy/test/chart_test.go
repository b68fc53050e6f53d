// Package test renders the chart of deploy/helm as Helm does, and holds its objects against the types
// of Kubernetes, the Restricted pod security standard and the program.
//
// It is a module of its own, so that the program's has no module of Helm or Kubernetes.
package test

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"helm.sh/helm/v4/pkg/chart/common"
	"helm.sh/helm/v4/pkg/chart/common/util"
	"helm.sh/helm/v4/pkg/chart/v2/lint"
	"helm.sh/helm/v4/pkg/chart/v2/lint/support"
	"helm.sh/helm/v4/pkg/chart/v2/loader"
	"helm.sh/helm/v4/pkg/engine"
	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	kjson "k8s.io/apimachinery/pkg/runtime/serializer/json"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/pod-security-admission/api"
	"k8s.io/pod-security-admission/policy"
	"sigs.k8s.io/yaml"
)

var update = flag.Bool("update", false, "write testdata/*.golden.yaml")

const (
	chartDir  = "../helm/tandem"
	release   = "tandem"
	namespace = "llm"
)

// object is a rendered object.
type object struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata"`
	text              []byte
	typed             runtime.Object // nil: of a kind that is not Kubernetes' own
}

func (o *object) String() string { return o.Kind + " " + o.Name }

// render returns the objects of the chart with values, and their text.
func render(values map[string]any) (objects []object, text string, err error) {
	return renderAs(release, namespace, values)
}

// renderAs is render for a release of that name in a namespace.
func renderAs(release, namespace string, values map[string]any) (objects []object, text string, err error) {
	chart, err := loader.Load(chartDir)
	if err != nil {
		return nil, "", err
	}
	caps := common.DefaultCapabilities.Copy()
	all, err := util.ToRenderValues(chart, values, common.ReleaseOptions{Name: release, Namespace: namespace, Revision: 1, IsInstall: true}, caps)
	if err != nil {
		return nil, "", err
	}
	files, err := engine.Render(chart, all)
	if err != nil {
		return nil, "", err
	}
	var b strings.Builder
	var names []string
	for name := range files {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		if strings.HasSuffix(name, ".txt") {
			continue
		}
		for part := range strings.SplitSeq("\n"+files[name], "\n---") {
			if part = strings.TrimSpace(part); onlyComments(part) {
				continue
			}
			fmt.Fprintf(&b, "---\n# %s\n%s\n", strings.TrimPrefix(name, "tandem/templates/"), part)
			o := object{text: []byte(part)}
			if err := yaml.Unmarshal(o.text, &o); err != nil {
				return nil, "", fmt.Errorf("%s: %w:\n%s", name, err, part)
			}
			objects = append(objects, o)
		}
	}
	return objects, b.String(), nil
}

func onlyComments(text string) bool {
	for line := range strings.Lines(text) {
		if line = strings.TrimSpace(line); line != "" && !strings.HasPrefix(line, "#") {
			return false
		}
	}
	return true
}

// cases returns the values of testdata, by name.
func cases(t *testing.T) (names []string, texts map[string]string) {
	t.Helper()
	files, err := filepath.Glob("testdata/*.values.yaml")
	if err != nil || len(files) < 6 {
		t.Fatalf("%d cases, %v", len(files), err)
	}
	texts = map[string]string{}
	for _, f := range files {
		text, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		name := strings.TrimSuffix(filepath.Base(f), ".values.yaml")
		names, texts[name] = append(names, name), string(text)
	}
	return names, texts
}

// parse reads values as Helm does.
func parse(t *testing.T, text string) map[string]any {
	t.Helper()
	values, err := loader.LoadValues(strings.NewReader(text))
	if err != nil {
		t.Fatal(err)
	}
	return values
}

// drawn is the secret that the chart draws at an installation.
var drawn = regexp.MustCompile(`(?m)^  gossip\.secret: \S+$`)

var decoder = kjson.NewSerializerWithOptions(kjson.DefaultMetaFactory, scheme.Scheme, scheme.Scheme, kjson.SerializerOptions{Yaml: true, Strict: true})

// decode reads an object by the types of Kubernetes. It fails for a field that its type does not have.
func decode(o *object) error {
	if !scheme.Scheme.Recognizes(o.GroupVersionKind()) {
		if !strings.Contains(o.APIVersion, ".") || strings.HasSuffix(o.GroupVersionKind().Group, ".k8s.io") && o.Kind != "HTTPRoute" {
			return fmt.Errorf("Kubernetes has no %s of %s", o.Kind, o.APIVersion)
		}
		return validate(o)
	}
	typed, _, err := decoder.Decode(o.text, nil, nil)
	o.typed = typed
	return err
}

// podOf returns the pods that an object makes.
func podOf(o runtime.Object) *corev1.PodTemplateSpec {
	switch o := o.(type) {
	case *appsv1.Deployment:
		return &o.Spec.Template
	case *batchv1.Job:
		return &o.Spec.Template
	case *batchv1.CronJob:
		return &o.Spec.JobTemplate.Spec.Template
	}
	return nil
}

// restricted returns what of a pod breaks the Restricted standard.
func restricted(t *testing.T, pod *corev1.PodTemplateSpec) (bad []string) {
	t.Helper()
	evaluator, err := policy.NewEvaluator(policy.DefaultChecks(), nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range evaluator.EvaluatePod(api.LevelVersion{Level: api.LevelRestricted, Version: api.LatestVersion()}, &pod.ObjectMeta, &pod.Spec) {
		if !r.Allowed {
			bad = append(bad, r.ForbiddenReason+": "+r.ForbiddenDetail)
		}
	}
	return bad
}

// checkPod checks what the API server would, and what it would not, of a pod.
func checkPod(t *testing.T, name string, pod *corev1.PodTemplateSpec) {
	t.Helper()
	volumes, names := map[string]bool{}, map[string]bool{}
	for _, v := range pod.Spec.Volumes {
		if volumes[v.Name] {
			t.Errorf("%s: two volumes %s", name, v.Name)
		}
		if s := v.Secret; s != nil && *s.DefaultMode != 0o440 || v.Projected != nil && *v.Projected.DefaultMode != 0o440 {
			t.Errorf("%s: other accounts may read the secrets of volume %s", name, v.Name)
		}
		volumes[v.Name] = true
	}
	used := map[string]bool{}
	for _, c := range slices.Concat(pod.Spec.InitContainers, pod.Spec.Containers) {
		paths := map[string]bool{}
		for _, m := range c.VolumeMounts {
			if used[m.Name] = true; !volumes[m.Name] || paths[m.MountPath] {
				t.Errorf("%s: container %s mounts %s at %s, which is not there or taken", name, c.Name, m.Name, m.MountPath)
			}
			paths[m.MountPath] = true
		}
		for _, p := range c.Ports {
			if names[p.Name] {
				t.Errorf("%s: two ports %s", name, p.Name)
			}
			if names[p.Name] = true; len(validation.IsValidPortName(p.Name)) > 0 {
				t.Errorf("%s: port %q", name, p.Name)
			}
		}
		for _, probe := range []*corev1.Probe{c.StartupProbe, c.LivenessProbe, c.ReadinessProbe} {
			if probe != nil && !names[probe.HTTPGet.Port.StrVal] {
				t.Errorf("%s: a probe of port %s, which has no name", name, probe.HTTPGet.Port.String())
			}
		}
		for _, e := range c.Env {
			if e.Value == "" && e.ValueFrom == nil {
				t.Errorf("%s: variable %s is empty", name, e.Name)
			}
		}
		for _, arg := range c.Args {
			if strings.Contains(arg, "%!") || strings.Contains(arg, "<nil>") || strings.Contains(arg, "<no value>") || strings.HasSuffix(arg, "=") {
				t.Errorf("%s: argument %q", name, arg)
			}
		}
	}
	for v := range volumes {
		if !used[v] {
			t.Errorf("%s: volume %s is not mounted", name, v)
		}
	}
	for key, value := range pod.Labels {
		if len(validation.IsQualifiedName(key)) > 0 || len(validation.IsValidLabelValue(value)) > 0 {
			t.Errorf("%s: label %s=%s", name, key, value)
		}
	}
}

// The chart renders for each case what is recorded, of Kubernetes' types; pods satisfy the
// Restricted standard unless the case says why not; names refer to what is there.
func TestChart(t *testing.T) {
	names, texts := cases(t)
	for _, name := range names {
		t.Run(name, func(t *testing.T) {
			objects, text, err := render(parse(t, texts[name]))
			if err != nil {
				t.Fatal(err)
			}
			golden := filepath.Join("testdata", name+".golden.yaml")
			text = drawn.ReplaceAllString(text, "  gossip.secret: DRAWN")
			if *update {
				if err := os.WriteFile(golden, []byte(text), 0o644); err != nil {
					t.Fatal(err)
				}
			} else if want, err := os.ReadFile(golden); err != nil || string(want) != text {
				t.Errorf("%s is not what the chart renders (%v); read the diff of `go test -C deploy/test -run TestChart . -update`", golden, err)
			}
			seen := map[string]bool{}
			broken := 0
			var pods []*corev1.PodTemplateSpec
			for i := range objects {
				o := &objects[i]
				if id := o.APIVersion + " " + o.String() + " " + o.Namespace; seen[id] {
					t.Errorf("two of %s", id)
				} else {
					seen[id] = true
				}
				if bad := validation.IsDNS1123Label(o.Name); len(bad) > 0 || o.Namespace == "" {
					t.Errorf("%s in %q: %v", o, o.Namespace, bad)
				}
				if err := decode(o); err != nil {
					t.Errorf("%s: %v", o, err)
					continue
				}
				if pod := podOf(o.typed); pod != nil {
					pods = append(pods, pod)
					checkPod(t, o.String(), pod)
					for _, bad := range restricted(t, pod) {
						if broken++; !strings.Contains(texts[name], "# not restricted:") {
							t.Errorf("%s is not Restricted: %s", o, bad)
						}
					}
				}
				if d, ok := o.typed.(*appsv1.Deployment); ok {
					s, err := metav1.LabelSelectorAsSelector(d.Spec.Selector)
					if err != nil || !s.Matches(labels.Set(d.Spec.Template.Labels)) {
						t.Errorf("%s does not select its pods (%v)", o, err)
					}
					c := d.Spec.Template.Spec.Containers[0]
					sleep := int64(0)
					if c.Lifecycle != nil {
						sleep = c.Lifecycle.PreStop.Sleep.Seconds
					}
					drain := regexp.MustCompile(`--shutdown-timeout=(\d+)s`).FindStringSubmatch(strings.Join(c.Args, " "))
					var seconds int64
					if _, err := fmt.Sscan(drain[1], &seconds); err != nil || *d.Spec.Template.Spec.TerminationGracePeriodSeconds < sleep+seconds+5 {
						t.Errorf("%s: %d s of grace for a sleep of %d s and a drain of %d s", o, *d.Spec.Template.Spec.TerminationGracePeriodSeconds, sleep, seconds)
					}
				}
			}
			if strings.Contains(texts[name], "# not restricted:") && broken == 0 {
				t.Error("the case says that pods are not Restricted, and all are")
			}
			checkServices(t, objects, pods)
		})
	}
}

// checkServices finds Services, budgets and policies that select no pod, and ports without a name.
func checkServices(t *testing.T, objects []object, pods []*corev1.PodTemplateSpec) {
	t.Helper()
	for i := range objects {
		s, ok := objects[i].typed.(*corev1.Service)
		if !ok {
			continue
		}
		selected := 0
		for _, pod := range pods {
			if !labels.SelectorFromSet(s.Spec.Selector).Matches(labels.Set(pod.Labels)) {
				continue
			}
			var names []string
			for _, p := range pod.Spec.Containers[0].Ports {
				names = append(names, p.Name)
			}
			selected++
			for _, p := range s.Spec.Ports {
				if !slices.Contains(names, p.TargetPort.StrVal) {
					t.Errorf("%s: pods with ports %q have no %s", &objects[i], names, p.TargetPort.StrVal)
				}
			}
		}
		if selected == 0 {
			t.Errorf("%s selects no pod", &objects[i])
		}
	}
}

// Helm finds nothing to complain about.
func TestLint(t *testing.T) {
	names, texts := cases(t)
	for _, name := range names {
		for _, m := range lint.RunAll(chartDir, parse(t, texts[name]), namespace).Messages {
			if m.Severity > support.InfoSev {
				t.Errorf("%s: %v", name, m)
			}
		}
	}
}

// Wrong values are refused, with an error that names the key.
func TestRefusedValues(t *testing.T) {
	for _, c := range []struct{ values, want string }{
		{`gateway: {replicaz: 3}`, "at '/gateway': additional properties 'replicaz' not allowed"},
		{`gateway: {replicas: many}`, "at '/gateway/replicas': got string, want integer"},
		{`gateway: {config: {max-num-seqz: 1}}`, "at '/gateway/config': additional properties 'max-num-seqz' not allowed"},
		{`gateway: {config: {port: 9000}}`, "at '/gateway/config': additional properties 'port' not allowed"},
		{`nodes: {config: {api-key: [a]}}`, "at '/nodes/config': additional properties 'api-key' not allowed"},
		{`pools: {decode: {gpu: 1}}`, "at '/pools/decode': additional properties 'gpu' not allowed"},
		{`pools: {more: {replicas: 1}}`, "at '/pools/more': missing property 'role'"},
		{`pools: {more: {role: both}}`, "at '/pools/more/role': value must be one of 'prefill', 'decode'"},
		{`pools: {Bad_Name: {role: decode}}`, "'Bad_Name'"},
		{`pools: {gossip: {role: decode}}`, "pools.gossip: the name is used by the chart"},
		{`nodes: {model: llama}`, `pools.decode.model is "llama", which models does not have`},
		{`models: {m: {pvc: {claimName: a}, hostPath: {path: /a}}}`, "models.m: give one of pvc, hostPath, image and hub"},
		{`pools: {decode: {terminationGracePeriodSeconds: 30}}`, "pools.decode.terminationGracePeriodSeconds is 30: want at least 65"},
		{`gateway: {terminationGracePeriodSeconds: 300}`, "gateway.terminationGracePeriodSeconds is 300: want at least 310"},
		{`nodes: {enabled: false}`, "the gateway needs gateway.upstreams"},
		{`pools: {decode: {enabled: false}, prefill: {enabled: false}}`, "every pool is disabled"},
		{`certificates: {mode: secret}`, "give certificates.existingSecrets.gateway"},
		{`certificates: {mode: vault}`, "at '/certificates/mode'"},
		{`gateway: {httpRoute: {enabled: true}}`, "give gateway.httpRoute.parentRefs"},
		{`gateway: {clientTLS: {existingSecret: a}}
monitoring: {podMonitor: {enabled: true}}`, "set gateway.adminPort"},
		{`pools: {decode: {autoscaling: {type: hpa, minReplicas: 0}}}`, "pools.decode.autoscaling.minReplicas is 0: want at least 1, or type keda"},
		{`tolerations: []`, "additional properties 'tolerations' not allowed"},
	} {
		_, _, err := render(parse(t, c.values))
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v; want %q", c.values, err, c.want)
		}
	}
}

// Names and values that YAML would take for another type, or for a comment, stay what they are.
func TestQuotedValues(t *testing.T) {
	for _, c := range []struct{ release, values, want string }{
		{"true", `pools: {"on": {role: decode}, "null": {role: prefill}}`, `app.kubernetes.io/instance: "true"`},
		{"a", `{nameOverride: "123", fullnameOverride: "true", clusterDomain: "123"}`, "name: \"true\"\n"},
		{"a", `gateway: {upstreams: ["http://a/#x: y #z", "k8s:456/svc:80"], clientTLS: {existingSecret: "1"}, apiKeys: {existingSecret: "0x1", key: "1"}, runtimeClassName: "on", priorityClassName: "1", spread: {topologyKey: "1"}, serviceAccount: {create: false, name: "12"}}`,
			`- "--upstream=http://a/#x: y #z"`},
		{"a", `{nodes: {model: "on", near: {topologyKey: "1"}, shm: "8"}, models: {"on": {hostPath: {path: "/a: b #c"}, path: "/x #y", servedModelName: "a: b #c"}}}`, `- "--served-model-name=a: b #c"`},
		{"a", `{nodes: {model: "1"}, models: {"1": {hub: {repository: "a: b", revision: "1 #2", claimName: "12"}}}}`, `- "--revision=1 #2"`},
		{"a", `{nodes: {model: p}, models: {p: {pvc: {claimName: "12"}, path: a}}}`, `- "--model=/model/a"`},
		{"a", `{certificates: {mode: secret, existingSecrets: {gateway: "12", nodes: "1e3"}}}`, `secretName: "1e3"`},
		{"a", `{certificates: {mode: certManager, certManager: {gossipSecret: "12"}}, monitoring: {podMonitor: {enabled: true}}, nodes: {autoscaling: {type: keda, serverAddress: "a: b #"}}, networkPolicy: {enabled: true}}`,
			`serverAddress: "a: b #"`},
	} {
		objects, text, err := renderAs(c.release, "123", parse(t, c.values))
		if err != nil {
			t.Errorf("%s: %v", c.values, err)
			continue
		}
		for i := range objects {
			if err := decode(&objects[i]); err != nil {
				t.Errorf("%s: %s: %v", c.values, &objects[i], err)
			}
		}
		if !strings.Contains(text, c.want) {
			t.Errorf("%s: no %s", c.values, c.want)
		}
	}
}

// Releases of one name in two namespaces have no object in common where their upstreams are.
func TestUpstreamsOfTwoReleases(t *testing.T) {
	seen := map[string]string{}
	for _, namespace := range []string{"a", "b"} {
		objects, _, err := renderAs(release, namespace, parse(t, `gateway: {upstreams: ["k8s:models/svc:80", "k8s:svc:80"]}`))
		if err != nil {
			t.Fatal(err)
		}
		for _, o := range objects {
			at := o.Namespace + " " + o.String()
			if other := seen[at]; other != "" {
				t.Errorf("%s is of the releases in %s and %s", at, other, namespace)
			}
			seen[at] = namespace
		}
	}
}

// A pool's own setting replaces that of all nodes, also where it is false, 0 or empty.
func TestPoolsOwnSettings(t *testing.T) {
	_, text, err := render(parse(t, `
nodes: {spread: {topologyKey: zone}, gpus: 2, podDisruptionBudget: {enabled: true}, config: {max-num-seqs: 7, kv-tls: true}}
pools:
  prefill: {enabled: false}
  decode: {replicas: 3, spread: {topologyKey: ""}, gpus: 0, podDisruptionBudget: {enabled: false}, config: {kv-tls: false}}
gateway: {podDisruptionBudget: {enabled: false}, spread: {topologyKey: ""}}`))
	if err != nil {
		t.Fatal(err)
	}
	for _, none := range []string{"topologySpreadConstraints", "nvidia.com/gpu", "PodDisruptionBudget", "tandem-prefill"} {
		if strings.Contains(text, none) {
			t.Errorf("the objects have %s", none)
		}
	}
	if !strings.Contains(text, "    kv-tls: false\n    max-num-seqs: 7\n") {
		t.Error("the settings are not merged")
	}
}

// A spoiled object of another project is refused, too.
func TestDefinitions(t *testing.T) {
	for text, ok := range map[string]bool{
		"{apiVersion: keda.sh/v1alpha1, kind: ScaledObject, metadata: {name: a}, spec: {scaleTargetRef: {name: a}, triggers: [{type: cron, metadata: {}}]}}":                     true,
		"{apiVersion: keda.sh/v1alpha1, kind: ScaledObject, metadata: {name: a}, spec: {scaleTargetRef: {name: a}, triggers: [{type: cron, metadata: {}}], maxReplicaCount: x}}": false,
		"{apiVersion: monitoring.coreos.com/v1, kind: PodMonitor, metadata: {name: a}, spec: {selector: {}, podMetricsEndpoint: []}}":                                            false,
		"{apiVersion: cert-manager.io/v1, kind: Certificate, metadata: {name: a}, spec: {secretName: a, uri: [b]}}":                                                              false,
		"{apiVersion: gateway.networking.k8s.io/v1, kind: HTTPRoute, metadata: {name: a}, spec: {rules: [{matches: [{path: {type: Prefix, value: /}}]}]}}":                       false,
		"{apiVersion: apps/v1, kind: Deployment, metadata: {name: a}, spec: {replicaz: 1}}":                                                                                      false,
		"{apiVersion: apps/v2, kind: Deployment, metadata: {name: a}}":                                                                                                           false,
	} {
		o := object{text: []byte(text)}
		if err := yaml.Unmarshal(o.text, &o); err != nil {
			t.Fatal(err)
		}
		if err := decode(&o); (err == nil) != ok {
			t.Errorf("%s: %v", text, err)
		}
	}
}
