//go:build deploy && linux

package kube

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
)

// metricsPort is the port of the API of external metrics.
const metricsPort = "6444"

// externalMetrics are the metrics that prometheus-adapter has by deploy/prometheus/adapter.yml.
// Each is the sum over a pool.
var externalMetrics = map[string]string{
	"tandem_prefill_queue_seconds": "tandem:prefill_queue_seconds",
	"tandem_decode_pressure":       "tandem:decode_pressure",
}

// ServeMetrics serves the API of external metrics until the test ends. A value is the sum of what
// the pods of a pool have at the time of the request.
func (c *Cluster) ServeMetrics(t *testing.T) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:"+metricsPort)
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{Handler: http.HandlerFunc(c.answerMetrics)}
	go func() { _ = server.ServeTLS(l, c.APICertificate(), c.path("api/apiserver.key")) }()
	t.Cleanup(func() { _ = server.Close() })
	c.apply(t, `
apiVersion: v1
kind: Service
metadata: {name: external-metrics, namespace: kube-system}
spec: {type: ExternalName, externalName: localhost, ports: [{port: `+metricsPort+`}]}
---
apiVersion: apiregistration.k8s.io/v1
kind: APIService
metadata: {name: v1beta1.external.metrics.k8s.io}
spec:
  group: external.metrics.k8s.io
  version: v1beta1
  groupPriorityMinimum: 100
  versionPriority: 100
  insecureSkipTLSVerify: true
  service: {name: external-metrics, namespace: kube-system, port: `+metricsPort+`}
`)
}

// apply creates or changes objects.
func (c *Cluster) apply(t *testing.T, text string) {
	t.Helper()
	c.write(t, "objects.yaml", []byte(text))
	c.Run(t, "kubectl", "apply", "-f", c.path("objects.yaml"))
}

func (c *Cluster) answerMetrics(w http.ResponseWriter, r *http.Request) {
	const group = "/apis/external.metrics.k8s.io/v1beta1"
	var answer any
	namespace, name, _ := strings.Cut(strings.TrimPrefix(r.URL.Path, group+"/namespaces/"), "/")
	metric, known := externalMetrics[name]
	switch {
	case r.URL.Path == group:
		answer = metav1.APIResourceList{
			TypeMeta: metav1.TypeMeta{Kind: "APIResourceList", APIVersion: "v1"}, GroupVersion: "external.metrics.k8s.io/v1beta1",
			APIResources: []metav1.APIResource{{Name: "externalmetrics", Namespaced: true, Kind: "ExternalMetricValueList", Verbs: []string{"get"}}},
		}
	case known:
		items := []any{}
		if sum, pods := c.pool(r.Context(), namespace, metric, r.URL.Query().Get("labelSelector")); pods > 0 {
			items = append(items, map[string]any{"metricName": name, "metricLabels": map[string]string{}, "timestamp": metav1.Now(), "value": fmt.Sprintf("%dm", int(1000*sum))})
		}
		answer = map[string]any{"kind": "ExternalMetricValueList", "apiVersion": "external.metrics.k8s.io/v1beta1", "metadata": struct{}{}, "items": items}
	default:
		http.NotFound(w, r)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(answer) // fails if the API server has gone
}

// pool returns the sum of a metric over the pods that a selector of the chart names, and how many
// have it.
func (c *Cluster) pool(ctx context.Context, namespace, metric, selector string) (sum float64, pods int) {
	set, err := labels.ConvertSelectorToLabelsMap(selector)
	if err != nil {
		return 0, 0
	}
	list, err := c.Client.CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{
		LabelSelector: "tandem/pool=" + set["pool"] + ",app.kubernetes.io/instance=" + set["fleet"]})
	if err != nil {
		return 0, 0
	}
	for i := range list.Items {
		if v, err := scrape(ctx, &list.Items[i], metric); err == nil {
			sum, pods = sum+v, pods+1
		}
	}
	return sum, pods
}

// scrape returns the sum of a metric's samples of a pod.
func scrape(ctx context.Context, pod *corev1.Pod, metric string) (sum float64, err error) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	var port int32
	for _, p := range pod.Spec.Containers[0].Ports {
		if p.Name == "http" {
			port = p.ContainerPort
		}
	}
	req, err := http.NewRequestWithContext(ctx, "GET", fmt.Sprintf("http://%s:%d/metrics", pod.Status.PodIP, port), nil)
	if err != nil {
		return 0, err
	}
	resp, err := probeClient.Do(req)
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		return 0, err
	}
	found := regexp.MustCompile(`(?m)^`+regexp.QuoteMeta(metric)+`(?:\{.*\})? (\S+)$`).FindAllSubmatch(text, -1)
	if found == nil {
		return 0, fmt.Errorf("%s has no metric %s", pod.Name, metric)
	}
	for _, m := range found {
		v, err := strconv.ParseFloat(string(m[1]), 64)
		if err != nil {
			return 0, err
		}
		sum += v
	}
	return sum, nil
}
