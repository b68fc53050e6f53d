//go:build deploy && linux

package kube

import (
	"testing"

	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Of two pods of a pool one may be evicted at a time. kubectl drain empties a machine, within the
// budgets. Both fail and alter no stream.
func (f *fleet) testEviction(t *testing.T) {
	l := f.load(t)
	evict := func(name string) error {
		return f.Client.PolicyV1().Evictions(namespace).Evict(t.Context(), &policyv1.Eviction{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: namespace}})
	}
	t.Run("api", func(t *testing.T) {
		f.disturb(t, l, func() {
			for _, component := range []string{"decode", "gateway"} {
				pods := f.running(t, component)
				if err := evict(pods[0].Name); err != nil {
					t.Errorf("the first eviction of %s: %v", component, err)
				}
				if err := evict(pods[1].Name); !apierrors.IsTooManyRequests(err) {
					t.Errorf("the second eviction of %s: %v; want 429", component, err)
				}
				f.rolledOut(t, component)
			}
		})
	})
	t.Run("drain", func(t *testing.T) {
		machine := f.running(t, "decode")[0].Spec.NodeName
		f.disturb(t, l, func() {
			f.Run(t, "kubectl", "drain", machine, "--delete-emptydir-data", "--ignore-daemonsets", "--timeout", settleBound.String())
		})
		for _, component := range []string{"gateway", "prefill", "decode"} {
			for _, p := range f.running(t, component) {
				if p.Spec.NodeName == machine {
					t.Errorf("%s runs on the drained machine", p.Name)
				}
			}
			f.rolledOut(t, component)
		}
		f.Run(t, "kubectl", "uncordon", machine)
	})
}
