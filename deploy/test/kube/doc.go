//go:build deploy && linux

// Package kube runs Kubernetes without containers on one machine: etcd, kube-apiserver,
// kube-controller-manager and kube-scheduler as processes, and nodes whose pods are processes.
//
// A pod has a network namespace with an address of its own. Each of its containers is a process in
// mount, process and host name namespaces, with the pod's volumes, its user and a read-only root as
// the specification has them. The kubelet here starts init containers, probes containers, restarts
// them, and stops them by preStop, SIGTERM and SIGKILL. Names and addresses of Services are served
// by a DNS server and a proxy of connections.
//
// Images are not pulled: Images maps their references to programs of this machine. Resources,
// seccomp, PersistentVolumeClaims and NetworkPolicies have no effect.
//
// Everything is in namespaces of the test's process (Main), and ends with it.
package kube
