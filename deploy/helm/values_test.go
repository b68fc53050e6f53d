// Package helm holds the chart's values: its table makes the schema that Helm checks values by, and
// the page of all values. deploy/test renders the chart.
package helm

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"
)

var update = flag.Bool("update", false, "write values.schema.json and docs/kubernetes-values.md")

// value is a key of values.yaml. NAME in a path stands for the key of a map.
type value struct {
	path, kind, meaning string
}

// section is a part of the page.
type section struct {
	title, text string
	values      []value
}

// placement has what gateways and nodes have alike.
var placement = []value{
	{"image", "image", "image instead of that of `image`, by the same keys"},
	{"preStopSeconds", "int", "sleep between the deletion of a pod and SIGTERM, until load balancers have noticed"},
	{"shutdownSeconds", "int1", "`--shutdown-timeout`: how long streams may run after SIGTERM"},
	{"terminationGracePeriodSeconds", "int", "time until SIGKILL; 0: `preStopSeconds` + `shutdownSeconds` + 15; less than + 5 is refused"},
	{"startupSeconds", "int1", "time until `/livez` has to answer; a node answers when its model is loaded"},
	{"probes.liveness", "object", "times of the probe of `/livez`: `periodSeconds`, `timeoutSeconds`, `failureThreshold`"},
	{"probes.readiness", "object", "times of the probe of `/readyz`"},
	{"strategy", "object", "strategy of the Deployment"},
	{"resources", "object", "requests and limits of the container"},
	{"podDisruptionBudget.enabled", "bool", "limit evictions where there is more than one replica"},
	{"podDisruptionBudget.maxUnavailable", "intOrPercent", "pods that evictions may end at once"},
	{"spread.topologyKey", "string", "label of nodes over which pods are spread; empty: not spread"},
	{"spread.maxSkew", "int1", "greatest difference of the numbers of pods"},
	{"spread.whenUnsatisfiable", "enum ScheduleAnyway DoNotSchedule", "whether the spread is a wish or a condition"},
	{"serviceAccount.create", "bool", "create a ServiceAccount"},
	{"serviceAccount.name", "string", "its name, or that of one that exists"},
	{"serviceAccount.annotations", "labels", "its annotations"},
	{"nodeSelector", "labels", "labels that the machine must have"},
	{"tolerations", "objects", "taints of machines that are tolerated"},
	{"affinity", "object", "affinity of the pods, instead of what the chart makes"},
	{"priorityClassName", "string", "priority of the pods"},
	{"runtimeClassName", "string", "container runtime, such as `nvidia`"},
	{"podAnnotations", "labels", "annotations of the pods"},
	{"podLabels", "labels", "further labels of the pods"},
	{"podSecurityContext", "object", "changes of the pods' securityContext, key by key"},
	{"securityContext", "object", "changes of the containers' securityContext, key by key"},
	{"env", "objects", "environment variables of the container, such as `TANDEM_LOG_LEVEL`"},
	{"envFrom", "objects", "ConfigMaps and Secrets with environment variables"},
	{"extraArgs", "strings", "further flags"},
	{"extraVolumes", "objects", "further volumes of the pods"},
	{"extraVolumeMounts", "objects", "where the container has them"},
	{"extraPodSpec", "object", "further fields of the pods' spec"},
}

// under returns values below a path.
func under(prefix string, values []value) (all []value) {
	for _, v := range values {
		v.path = prefix + "." + v.path
		all = append(all, v)
	}
	return all
}

var nodeValues = slices.Concat([]value{
	{"nodes.replicas", "int", "pods of each pool, unless it is autoscaled"},
	{"nodes.model", "string", "key of `models`; empty: the small model of the program"},
	{"nodes.config", "config node", "settings, by the keys of `tandem decode --help`"},
	{"nodes.gpus", "int", "GPUs of a pod"},
	{"nodes.gpuResource", "string", "name of the resource of GPUs"},
	{"nodes.rdma.count", "int", "RDMA devices of a pod; set `config.kv-transport` to `rdma`, too"},
	{"nodes.rdma.resource", "string", "name of the resource of RDMA devices"},
	{"nodes.rdma.ipcLock", "bool", "run as root with IPC_LOCK, where the container runtime limits locked memory; not Restricted"},
	{"nodes.shm", "string", "size of `/dev/shm`, such as `8Gi`, which NCCL needs for several GPUs; empty: the runtime's"},
	{"nodes.resourceClaims", "objects", "claims of devices (DRA); the container has all"},
	{"nodes.near.topologyKey", "string", "label of nodes, such as that of racks: prefill and decode pods prefer each other's; empty: no preference"},
	{"nodes.near.weight", "int1", "weight of that preference, 1 to 100"},
	{"nodes.autoscaling.type", "enum '' hpa keda", "what scales the pool; empty: nothing"},
	{"nodes.autoscaling.minReplicas", "int", "least pods; 0 needs KEDA, and `keep-models` in `gateway.config`"},
	{"nodes.autoscaling.maxReplicas", "int1", "most pods"},
	{"nodes.autoscaling.target", "number", "load of a pod: prefill, seconds of queued prompts (0: 1); decode, share of KV memory or of sequences (0: 0.7)"},
	{"nodes.autoscaling.stabilizationSeconds", "int", "time for which the load must be lower before pods are removed"},
	{"nodes.autoscaling.removeEverySeconds", "int1", "time between the removals of two pods"},
	{"nodes.autoscaling.serverAddress", "string", "URL of Prometheus, for KEDA"},
	{"nodes.autoscaling.pollingSeconds", "int1", "time between two queries of KEDA for a pool without pods"},
	{"nodes.autoscaling.triggerMetadata", "labels", "further metadata of KEDA's Prometheus triggers"},
	{"nodes.autoscaling.authenticationRef", "object", "KEDA's TriggerAuthentication for Prometheus"},
}, under("nodes", placement))

var sections = []section{
	{"Names and image", "", []value{
		{"nameOverride", "string", "name of the chart in labels and names"},
		{"fullnameOverride", "string", "prefix of all names; empty: that of the release"},
		{"clusterDomain", "string", "DNS domain of the cluster"},
		{"commonLabels", "labels", "further labels of all objects and pods"},
		{"image.repository", "string", "image; none has been published: push that of `make release` to a registry of yours"},
		{"image.tag", "string", "tag; empty: the chart's `appVersion`"},
		{"image.digest", "string", "digest, such as `sha256:…`, instead of the tag"},
		{"image.pullPolicy", "enum Always IfNotPresent Never", "when the image is pulled"},
		{"imagePullSecrets", "objects", "Secrets for the registry, as `[{name: …}]`"},
	}},
	{"Gateways", "", slices.Concat([]value{
		{"gateway.replicas", "int", "gateways"},
		{"gateway.config", "config gateway", "settings, by the keys of `tandem gateway --help`"},
		{"gateway.listen", "string", "address to listen on; `\"::\"` in a cluster of IPv6"},
		{"gateway.upstreams", "strings", "`--upstream`: servers of other kinds, such as `k8s:NAMESPACE/SERVICE:PORT`"},
		{"gateway.prefillUpstreams", "strings", "`--upstream-prefill`"},
		{"gateway.decodeUpstreams", "strings", "`--upstream-decode`"},
		{"gateway.apiKeys.existingSecret", "string", "Secret with the file of `--api-key-file`"},
		{"gateway.apiKeys.key", "string", "its key"},
		{"gateway.clientTLS.existingSecret", "string", "Secret of type `kubernetes.io/tls` for clients; empty: plain HTTP"},
		{"gateway.allowedHosts", "strings", "`--allowed-hosts`, in addition to the names of the Service and of the route"},
		{"gateway.adminPort", "int", "port of `--admin-listen`; everyone who reaches it is an operator; 0: none"},
		{"gateway.service.type", "enum ClusterIP NodePort LoadBalancer", "type of the Service for clients"},
		{"gateway.service.port", "int1", "its port"},
		{"gateway.service.annotations", "labels", "its annotations"},
		{"gateway.service.extra", "object", "further fields of its spec, such as `loadBalancerClass`"},
		{"gateway.httpRoute.enabled", "bool", "make an HTTPRoute of the Gateway API"},
		{"gateway.httpRoute.annotations", "labels", "its annotations"},
		{"gateway.httpRoute.parentRefs", "objects", "the Gateways that it belongs to"},
		{"gateway.httpRoute.hostnames", "strings", "its host names"},
		{"gateway.httpRoute.filters", "objects", "its filters"},
	}, under("gateway", placement))},
	{"Nodes and pools", `Each key below ` + "`nodes`" + ` but ` + "`enabled`" + ` is also a key of a pool, as in
` + "`pools.decode.gpus`" + `, and replaces that of ` + "`nodes`" + `. Maps are merged.`,
		slices.Concat([]value{
			{"nodes.enabled", "bool", "run nodes; false: gateways alone, in front of `gateway.upstreams`"},
			{"pools.NAME.enabled", "bool", "run the pool"},
			{"pools.NAME.role", "enum prefill decode", "what its nodes do"},
		}, nodeValues)},
	{"Models", "", []value{
		{"models.NAME.servedModelName", "string", "name in the API; default: NAME"},
		{"models.NAME.path", "string", "folder or .gguf file in the volume; default: the volume itself"},
		{"models.NAME.pvc.claimName", "string", "PersistentVolumeClaim with the model"},
		{"models.NAME.pvc.readOnly", "bool", "mount the claim read-only on the machine"},
		{"models.NAME.hostPath.path", "string", "folder of the machine; not Restricted"},
		{"models.NAME.image.reference", "string", "OCI image with the model, mounted as a volume (Kubernetes 1.35)"},
		{"models.NAME.image.pullPolicy", "enum Always IfNotPresent Never", "when it is pulled"},
		{"models.NAME.hub.repository", "string", "ORG/NAME of the Hugging Face hub, which an init container downloads (`tandem pull`)"},
		{"models.NAME.hub.revision", "string", "branch, tag or commit; default: `main`"},
		{"models.NAME.hub.endpoint", "string", "URL of another hub"},
		{"models.NAME.hub.tokenSecret.name", "string", "Secret with the hub's token"},
		{"models.NAME.hub.tokenSecret.key", "string", "its key; default: `token`"},
		{"models.NAME.hub.envFrom", "objects", "ConfigMaps and Secrets with the download's variables, such as a proxy"},
		{"models.NAME.hub.claimName", "string", "PersistentVolumeClaim for the cache, which pods may share; default: a folder of each pod"},
		{"models.NAME.hub.sizeLimit", "string", "size of that folder"},
	}},
	{"Certificates", "", []value{
		{"certificates.mode", "enum job certManager secret", "who makes the fleet's certificates"},
		{"certificates.existingSecrets.gateway", "string", "for `secret`: the gateways' folder of `tandem ca`"},
		{"certificates.existingSecrets.nodes", "string", "for `secret`: the nodes' folder"},
		{"certificates.job.renewSchedule", "string", "for `job`: when certificates are looked at again (cron); empty: never"},
		{"certificates.job.renewWithin", "duration", "for `job`: time left at which a certificate is renewed"},
		{"certificates.job.resources", "object", "for `job`: requests and limits of its container"},
		{"certificates.certManager.issuerRef", "object", "for `certManager`: an issuer with an authority for this fleet alone; empty: the chart makes one"},
		{"certificates.certManager.duration", "duration", "for `certManager`: how long certificates are valid"},
		{"certificates.certManager.renewBefore", "duration", "for `certManager`: time left at which one is renewed"},
		{"certificates.certManager.gossipSecret", "string", "for `certManager`: Secret whose key `gossip.secret` has 64 hexadecimal digits; empty: the chart makes one"},
	}},
	{"Network policy", "", []value{
		{"networkPolicy.enabled", "bool", "allow only the connections that the fleet needs"},
		{"networkPolicy.clients", "objects", "peers that may use the gateways; empty: all"},
		{"networkPolicy.scrapers", "objects", "peers that may read metrics and use `gateway.adminPort`; empty: pods of the namespace"},
		{"networkPolicy.egress.enabled", "bool", "limit what the fleet connects to: itself and DNS"},
		{"networkPolicy.egress.extra", "objects", "further egress rules: upstreams, hub, collector, Kubernetes API"},
	}},
	{"Monitoring", "", []value{
		{"monitoring.annotations", "bool", "`prometheus.io/…` annotations on pods"},
		{"monitoring.podMonitor.enabled", "bool", "make a PodMonitor of the Prometheus operator"},
		{"monitoring.podMonitor.labels", "labels", "its labels, by which a Prometheus selects it"},
		{"monitoring.podMonitor.interval", "string", "time between two scrapes"},
		{"monitoring.podMonitor.authorization", "object", "credentials for gateways with API keys but without `adminPort`"},
	}},
}

// ownFlags are flags that the chart sets by other values, so that config must not have them.
var ownFlags = map[string][]string{
	"gateway": {"config", "dry-run", "node-name", "shutdown-timeout", "host", "port", "insecure", "ssl-certfile", "ssl-keyfile", "api-key", "api-key-file", "admin-listen", "allowed-hosts",
		"upstream", "upstream-prefill", "upstream-decode", "upstream-api-key", "advertise", "join", "tls-dir", "gossip-port", "nats-port"},
	"decode": {"config", "dry-run", "node-name", "shutdown-timeout", "host", "advertise", "join", "tls-dir", "gossip-port", "rpc-port", "kv-port", "http-port", "model", "revision", "download"},
}

var flagRow = regexp.MustCompile("(?m)^\\| `--([a-z0-9-]+)` \\| ([^|]+) \\| ([^|]*) \\|")

// flagsOf returns the types of a command's flags, from docs/flags.md, without those of ownFlags.
func flagsOf(t *testing.T, command string) map[string]string {
	t.Helper()
	text, err := os.ReadFile("../../docs/flags.md")
	if err != nil {
		t.Fatal(err)
	}
	table, _, _ := strings.Cut(string(text), "\n## ")
	types, own := map[string]string{}, slices.Clone(ownFlags[command])
	for _, m := range flagRow.FindAllStringSubmatch(table, -1) {
		if m[2] != "all" && !slices.Contains(strings.Split(m[2], ", "), command) {
			continue
		}
		if i := slices.Index(own, m[1]); i >= 0 {
			own = slices.Delete(own, i, i+1)
			continue
		}
		types[m[1]] = m[3]
	}
	if len(own) > 0 || len(types) < 30 {
		t.Fatalf("tandem %s has no flag %q, or too few: %d", command, own, len(types))
	}
	return types
}

type object = map[string]any

// config returns the schema of a command's settings.
func config(t *testing.T, command string) object {
	properties := object{}
	for name, kind := range flagsOf(t, command) {
		switch kind {
		case "bool":
			properties[name] = object{"type": "boolean"}
		case "port":
			properties[name] = object{"type": "integer", "minimum": 0, "maximum": 65535}
		case "int", "float64", "size":
			properties[name] = object{"type": []string{"integer", "number", "string"}}
		case "string", "duration":
			properties[name] = object{"type": []string{"string", "integer", "number"}}
		default: // lists, and JSON that may stand as YAML
			properties[name] = object{}
		}
	}
	return object{"type": "object", "properties": properties, "additionalProperties": false}
}

// schemaOf returns the schema of a kind of value.
func schemaOf(t *testing.T, kind string) object {
	name, rest, _ := strings.Cut(kind, " ")
	switch name {
	case "string":
		return object{"type": "string"}
	case "bool":
		return object{"type": "boolean"}
	case "int":
		return object{"type": "integer", "minimum": 0}
	case "int1":
		return object{"type": "integer", "minimum": 1}
	case "number":
		return object{"type": "number", "minimum": 0}
	case "intOrPercent":
		return object{"type": []string{"integer", "string"}}
	case "duration":
		return object{"type": "string", "pattern": `^([0-9]+(h|m|s))+$`}
	case "enum":
		words := strings.Fields(rest)
		for i := range words {
			words[i] = strings.Trim(words[i], "'")
		}
		return object{"enum": words}
	case "strings":
		return object{"type": "array", "items": object{"type": "string"}}
	case "objects":
		return object{"type": "array", "items": object{"type": "object"}}
	case "labels":
		return object{"type": "object", "additionalProperties": object{"type": "string"}}
	case "object":
		return object{"type": "object"}
	case "image":
		image := object{}
		for _, v := range sections[0].values {
			if key, ok := strings.CutPrefix(v.path, "image."); ok {
				image[key] = schemaOf(t, v.kind)
			}
		}
		return object{"type": "object", "properties": image, "additionalProperties": false}
	case "config":
		return config(t, map[string]string{"gateway": "gateway", "node": "decode"}[rest])
	}
	t.Fatalf("unknown kind %q", kind)
	return nil
}

// names are the keys of maps: they become a part of names and labels.
var names = map[string]string{
	"pools":  `^[a-z]([-a-z0-9]{0,18}[a-z0-9])?$`,
	"models": `^[A-Za-z0-9]([-A-Za-z0-9._]{0,61}[A-Za-z0-9])?$`,
}

// put adds the schema of a path below an object's schema.
func put(at object, path, leaf string, schema object) {
	key, rest, more := strings.Cut(path, ".")
	if key == "NAME" {
		into, ok := at["additionalProperties"].(object)
		if !ok {
			into = object{"type": "object", "properties": object{}, "additionalProperties": false}
			at["additionalProperties"], at["propertyNames"] = into, object{"pattern": names[leaf]}
		}
		put(into, rest, key, schema)
		return
	}
	properties := at["properties"].(object)
	if !more {
		properties[key] = schema
		return
	}
	if properties[key] == nil {
		properties[key] = object{"type": "object", "properties": object{}, "additionalProperties": false}
	}
	put(properties[key].(object), rest, key, schema)
}

// schema returns values.schema.json.
func schema(t *testing.T) []byte {
	t.Helper()
	root := object{"$schema": "http://json-schema.org/draft-07/schema#", "type": "object", "properties": object{}, "additionalProperties": false}
	// Helm passes global to each chart.
	root["properties"].(object)["global"] = object{"type": "object"}
	for _, s := range sections {
		for _, v := range s.values {
			put(root, v.path, "", schemaOf(t, v.kind))
		}
	}
	for _, v := range nodeValues {
		put(root, "pools.NAME."+strings.TrimPrefix(v.path, "nodes."), "", schemaOf(t, v.kind))
	}
	root["properties"].(object)["pools"].(object)["additionalProperties"].(object)["required"] = []string{"role"}
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	e.SetIndent("", " ")
	if err := e.Encode(root); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// defaults returns values.yaml.
func defaults(t *testing.T) object {
	t.Helper()
	text, err := os.ReadFile("tandem/values.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var all object
	if err := yaml.Unmarshal(text, &all); err != nil {
		t.Fatal(err)
	}
	return all
}

// at returns the value of a path in values.yaml.
func at(values object, path string) (any, bool) {
	var now any = values
	for key := range strings.SplitSeq(path, ".") {
		m, ok := now.(object)
		if !ok {
			return nil, false
		}
		if now, ok = m[key]; !ok {
			return nil, false
		}
	}
	return now, true
}

// page returns docs/kubernetes-values.md.
func page(t *testing.T) []byte {
	t.Helper()
	values := defaults(t)
	var b bytes.Buffer
	b.WriteString(`# Values of the Helm chart

This page is made from the table in ` + "`deploy/helm/values_test.go`" + `, and so is the chart's schema:
` + "`go test ./deploy/helm -update`" + ` writes both. [Run on Kubernetes](kubernetes.md) explains how to use
the chart. Helm refuses a key that is not here.
`)
	for _, s := range sections {
		fmt.Fprintf(&b, "\n## %s\n", s.title)
		if s.text != "" {
			fmt.Fprintf(&b, "\n%s\n", s.text)
		}
		b.WriteString("\n| key | default | meaning |\n|---|---|---|\n")
		for _, v := range s.values {
			text := ""
			if d, ok := at(values, v.path); ok {
				j, err := json.Marshal(d)
				if err != nil {
					t.Fatal(err)
				}
				if text = "`" + string(j) + "`"; d == "" {
					text = ""
				}
			} else if !strings.Contains(v.path, "NAME") {
				t.Errorf("values.yaml has no %s", v.path)
			}
			meaning := v.meaning
			if words, ok := strings.CutPrefix(v.kind, "enum "); ok {
				meaning += ": `" + strings.Join(strings.Fields(strings.ReplaceAll(words, "'' ", "")), "`, `") + "`"
			}
			fmt.Fprintf(&b, "| `%s` | %s | %s |\n", v.path, text, strings.ReplaceAll(meaning, "|", `\|`))
		}
	}
	return b.Bytes()
}

// keys returns the paths of values.yaml that have no row.
func keys(values object, prefix string, rows map[string]bool) (missing []string) {
	for _, key := range slices.Sorted(maps.Keys(values)) {
		path := strings.TrimPrefix(prefix+"."+key, ".")
		if rows[path] {
			continue
		}
		if m, ok := values[key].(object); ok && len(m) > 0 {
			missing = append(missing, keys(m, path, rows)...)
		} else if path != "models" {
			missing = append(missing, path)
		}
	}
	return missing
}

// Each key of values.yaml has a row, and the schema and the page are those of the rows.
func TestValues(t *testing.T) {
	rows := map[string]bool{}
	for _, s := range sections {
		for _, v := range s.values {
			if rows[v.path] {
				t.Errorf("%s has two rows", v.path)
			}
			rows[v.path] = true
		}
	}
	values := defaults(t)
	delete(values, "pools") // whose keys are those of nodes, and names
	if missing := keys(values, "", rows); len(missing) > 0 {
		t.Errorf("values.yaml has keys without a row: %q", missing)
	}
	for path, want := range map[string][]byte{"tandem/values.schema.json": schema(t), "../../docs/kubernetes-values.md": page(t)} {
		if *update {
			if err := os.WriteFile(path, want, 0o644); err != nil {
				t.Fatal(err)
			}
			continue
		}
		if got, err := os.ReadFile(path); err != nil || !bytes.Equal(got, want) {
			t.Errorf("%s is not current (%v); `go test ./deploy/helm -update` writes it", path, err)
		}
	}
}

// The chart has the version of the program.
func TestVersion(t *testing.T) {
	program, err := os.ReadFile("../../main.go")
	if err != nil {
		t.Fatal(err)
	}
	version := regexp.MustCompile(`var version = "(.+)"`).FindSubmatch(program)
	chart, err := os.ReadFile("tandem/Chart.yaml")
	if err != nil || version == nil {
		t.Fatal(err)
	}
	var c struct{ Version, AppVersion string }
	if err := yaml.Unmarshal(chart, &struct {
		Version    *string `yaml:"version"`
		AppVersion *string `yaml:"appVersion"`
	}{&c.Version, &c.AppVersion}); err != nil {
		t.Fatal(err)
	}
	if want := string(version[1]); c.Version != want || c.AppVersion != want {
		t.Errorf("the chart has versions %s and %s, the program %s", c.Version, c.AppVersion, want)
	}
}
