//go:build deploy && linux

package kube

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/cache"
)

// Image is what a reference of an image runs.
type Image struct {
	Root    string // folder of its files; "/" for those of this machine
	Program string // its program on this machine, which containers have as /tandem; "" for Root's /usr/bin/tandem
}

// kubelet runs the pods of all nodes.
type kubelet struct {
	client      kubernetes.Interface
	secrets     corelisters.SecretLister
	configMaps  corelisters.ConfigMapLister
	image       func(reference string) (Image, error)
	dir         string      // of pods' folders
	spoilTokens atomic.Bool // projected tokens are not valid
	logf        func(format string, args ...any)

	mu     sync.Mutex
	pods   map[types.UID]*pod
	serial int      // of pods so far
	kills  []string // pods with a container that got SIGKILL at the end of its grace
	wg     sync.WaitGroup
}

// addNode registers a node that is ready, with room for every pod.
func (k *kubelet) addNode(ctx context.Context, name string, more corev1.ResourceList) error {
	capacity := corev1.ResourceList{"cpu": resource.MustParse("64"), "memory": resource.MustParse("256Gi"), "pods": resource.MustParse("110")}
	for n, q := range more {
		capacity[n] = q
	}
	node := &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{
			"kubernetes.io/hostname": name, "kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64", "topology.kubernetes.io/zone": "zone-" + name,
		}},
	}
	made, err := k.client.CoreV1().Nodes().Create(ctx, node, metav1.CreateOptions{})
	if err != nil {
		return err
	}
	made.Status = corev1.NodeStatus{
		Capacity: capacity, Allocatable: capacity,
		Addresses:  []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: hostAddress}, {Type: corev1.NodeHostName, Address: name}},
		Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue, Reason: "KubeletReady", LastHeartbeatTime: metav1.Now(), LastTransitionTime: metav1.Now()}},
	}
	_, err = k.client.CoreV1().Nodes().UpdateStatus(ctx, made, metav1.UpdateOptions{})
	return err
}

// run follows the pods that the scheduler binds to nodes, until ctx ends.
func (k *kubelet) run(ctx context.Context, shared informers.SharedInformerFactory) error {
	k.pods = map[types.UID]*pod{}
	k.secrets, k.configMaps = shared.Core().V1().Secrets().Lister(), shared.Core().V1().ConfigMaps().Lister()
	_, err := shared.Core().V1().Pods().Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    func(o any) { k.changed(ctx, o.(*corev1.Pod)) },
		UpdateFunc: func(_, o any) { k.changed(ctx, o.(*corev1.Pod)) },
		DeleteFunc: func(o any) {
			if d, ok := o.(cache.DeletedFinalStateUnknown); ok {
				o = d.Obj
			}
			k.deleted(o.(*corev1.Pod))
		},
	})
	return err
}

// changed starts a pod, or gives its goroutine the change.
func (k *kubelet) changed(ctx context.Context, spec *corev1.Pod) {
	if spec.Spec.NodeName == "" {
		return
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	p := k.pods[spec.UID]
	if p == nil {
		k.serial++
		p = &pod{
			kubelet: k, spec: spec, serial: k.serial, volumes: map[string]*volume{}, dirty: make(chan struct{}, 1),
			dir: filepath.Join(k.dir, fmt.Sprintf("%s-%d", spec.Name, k.serial)), stop: make(chan struct{}),
			address: fmt.Sprintf("10.77.%d.%d", 1+k.serial/250, 1+k.serial%250), // no address is used again
		}
		k.pods[spec.UID] = p
		if err := os.MkdirAll(p.dir, 0o755); err != nil {
			k.logf("%s: %v", spec.Name, err)
			return
		}
		k.wg.Go(func() { p.run(ctx) })
	}
	if spec.DeletionTimestamp != nil {
		p.end(time.Duration(*spec.DeletionGracePeriodSeconds) * time.Second)
	}
}

// deleted ends a pod whose object is gone: that of a forced deletion still runs.
func (k *kubelet) deleted(spec *corev1.Pod) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if p := k.pods[spec.UID]; p != nil {
		delete(k.pods, spec.UID)
		p.end(time.Second)
	}
}

func (k *kubelet) killed(name string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.kills = append(k.kills, name)
}
