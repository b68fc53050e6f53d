//go:build deploy && linux

package kube

import (
	"fmt"
	"regexp"
	"strings"

	corev1 "k8s.io/api/core/v1"
)

// reference is $(NAME) in arguments and values, or $$(NAME), which is not one.
var reference = regexp.MustCompile(`\$?\$\([A-Za-z_][A-Za-z0-9_.-]*\)`)

// expand replaces references to variables that are set.
func expand(text string, variables map[string]string) string {
	return reference.ReplaceAllStringFunc(text, func(r string) string {
		if strings.HasPrefix(r, "$$") {
			return r[1:]
		}
		if value, ok := variables[r[2:len(r)-1]]; ok {
			return value
		}
		return r
	})
}

// environment returns the variables of a container.
func (p *pod) environment(c *corev1.Container) (map[string]string, error) {
	all := map[string]string{
		"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOSTNAME": p.spec.Name,
		"KUBERNETES_SERVICE_HOST": apiServiceAddress, "KUBERNETES_SERVICE_PORT": "443",
	}
	for _, from := range c.EnvFrom {
		files := map[string]projected{}
		var err error
		switch {
		case from.SecretRef != nil:
			err = p.addSecret(files, from.SecretRef.Name, nil, from.SecretRef.Optional, nil)
		case from.ConfigMapRef != nil:
			err = p.addConfigMap(files, from.ConfigMapRef.Name, nil, from.ConfigMapRef.Optional, nil)
		}
		if err != nil {
			return nil, err
		}
		for key, f := range files {
			all[from.Prefix+key] = f.text
		}
	}
	for _, e := range c.Env {
		value, ok, err := p.value(&e, all)
		if err != nil {
			return nil, err
		}
		if ok {
			all[e.Name] = value
		}
	}
	return all, nil
}

// value returns the value of a variable, or false where an optional source lacks it.
func (p *pod) value(e *corev1.EnvVar, before map[string]string) (value string, ok bool, err error) {
	from := e.ValueFrom
	if from == nil {
		return expand(e.Value, before), true, nil
	}
	files := map[string]projected{}
	switch {
	case from.FieldRef != nil:
		value, err = p.field(from.FieldRef.FieldPath)
		return value, true, err
	case from.SecretKeyRef != nil:
		r := from.SecretKeyRef
		err = p.addSecret(files, r.Name, []corev1.KeyToPath{{Key: r.Key, Path: "value"}}, r.Optional, nil)
	case from.ConfigMapKeyRef != nil:
		r := from.ConfigMapKeyRef
		err = p.addConfigMap(files, r.Name, []corev1.KeyToPath{{Key: r.Key, Path: "value"}}, r.Optional, nil)
	default:
		err = fmt.Errorf("the source of variable %s is not resolved here", e.Name)
	}
	f, ok := files["value"]
	return f.text, ok, err
}

// field returns a field of the pod, as the downward API names it.
func (p *pod) field(path string) (string, error) {
	if name, ok := strings.CutPrefix(path, "metadata.labels['"); ok {
		return p.spec.Labels[strings.TrimSuffix(name, "']")], nil
	}
	if name, ok := strings.CutPrefix(path, "metadata.annotations['"); ok {
		return p.spec.Annotations[strings.TrimSuffix(name, "']")], nil
	}
	switch path {
	case "metadata.name":
		return p.spec.Name, nil
	case "metadata.namespace":
		return p.spec.Namespace, nil
	case "metadata.uid":
		return string(p.spec.UID), nil
	case "spec.nodeName":
		return p.spec.Spec.NodeName, nil
	case "spec.serviceAccountName":
		return p.spec.Spec.ServiceAccountName, nil
	case "status.podIP", "status.podIPs":
		return p.address, nil
	case "status.hostIP":
		return hostAddress, nil
	}
	return "", fmt.Errorf("field %s is not known here", path)
}
