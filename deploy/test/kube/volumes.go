//go:build deploy && linux

package kube

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// volume is a folder of a pod. Folders of Secrets, ConfigMaps and projections follow their source.
type volume struct {
	dir     string
	content map[string]projected // nil: not a projection
	round   int
}

// projected is a file of a projection.
type projected struct {
	text string
	mode os.FileMode
}

// mountVolumes makes the folders of a pod's volumes. It fails while a Secret, a ConfigMap or one of
// their keys is missing.
func (p *pod) mountVolumes(ctx context.Context) error {
	p.volumesMu.Lock()
	defer p.volumesMu.Unlock()
	for i := range p.spec.Spec.Volumes {
		v := &p.spec.Spec.Volumes[i]
		if p.volumes[v.Name] != nil && p.volumes[v.Name].content == nil {
			continue
		}
		dir := filepath.Join(p.dir, "volumes", v.Name)
		switch {
		case v.HostPath != nil:
			p.volumes[v.Name] = &volume{dir: v.HostPath.Path}
		case v.EmptyDir != nil:
			if err := p.makeDir(dir, 0o777|os.ModeSetgid); err != nil {
				return err
			}
			p.volumes[v.Name] = &volume{dir: dir}
		default:
			content, err := p.content(ctx, v)
			if err != nil {
				return fmt.Errorf("MountVolume.SetUp failed for volume %q: %w", v.Name, err)
			}
			if p.volumes[v.Name] == nil {
				if err := p.makeDir(dir, 0o755); err != nil {
					return err
				}
				p.volumes[v.Name] = &volume{dir: dir}
			}
			if err := p.volumes[v.Name].project(content, p.fsGroup()); err != nil {
				return err
			}
		}
	}
	return nil
}

func (p *pod) makeDir(dir string, mode os.FileMode) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	if err := os.Chown(dir, 0, p.fsGroup()); err != nil {
		return err
	}
	return os.Chmod(dir, mode)
}

// fsGroup returns the group of the pod's files.
func (p *pod) fsGroup() int {
	if s := p.spec.Spec.SecurityContext; s != nil && s.FSGroup != nil {
		return int(*s.FSGroup)
	}
	return 0
}

// project replaces the folder's files at once, by a rename of the link ..data as a kubelet does.
func (v *volume) project(content map[string]projected, group int) error {
	if same(v.content, content) {
		return nil
	}
	before, _ := os.Readlink(filepath.Join(v.dir, "..data"))
	v.round++
	name := "..round" + strconv.Itoa(v.round)
	for path, f := range content {
		at := filepath.Join(v.dir, name, path)
		if err := os.MkdirAll(filepath.Dir(at), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(at, []byte(f.text), f.mode); err != nil {
			return err
		}
		if err := os.Chmod(at, f.mode); err != nil {
			return err
		}
		if err := os.Chown(at, 0, group); err != nil {
			return err
		}
	}
	if err := os.Symlink(name, filepath.Join(v.dir, "..data_tmp")); err != nil {
		return err
	}
	if err := os.Rename(filepath.Join(v.dir, "..data_tmp"), filepath.Join(v.dir, "..data")); err != nil {
		return err
	}
	for path := range content {
		if at := filepath.Join(v.dir, path); !exists(at) {
			if err := os.Symlink(filepath.Join("..data", path), at); err != nil {
				return err
			}
		}
	}
	v.content = content
	if before != "" {
		return os.RemoveAll(filepath.Join(v.dir, before))
	}
	return nil
}

func same(a, b map[string]projected) bool {
	if a == nil || len(a) != len(b) {
		return false
	}
	for path, f := range a {
		if b[path] != f {
			return false
		}
	}
	return true
}

// content returns the files of a Secret, a ConfigMap, a downward API or a projected volume.
func (p *pod) content(ctx context.Context, v *corev1.Volume) (map[string]projected, error) {
	files := map[string]projected{}
	switch {
	case v.Secret != nil:
		return files, p.addSecret(files, v.Secret.SecretName, v.Secret.Items, v.Secret.Optional, v.Secret.DefaultMode)
	case v.ConfigMap != nil:
		return files, p.addConfigMap(files, v.ConfigMap.Name, v.ConfigMap.Items, v.ConfigMap.Optional, v.ConfigMap.DefaultMode)
	case v.DownwardAPI != nil:
		return files, p.addFields(files, v.DownwardAPI.Items, v.DownwardAPI.DefaultMode)
	case v.Projected == nil:
		return nil, fmt.Errorf("volumes of this kind are not made here")
	}
	for _, s := range v.Projected.Sources {
		var err error
		mode := v.Projected.DefaultMode
		switch {
		case s.Secret != nil:
			err = p.addSecret(files, s.Secret.Name, s.Secret.Items, s.Secret.Optional, mode)
		case s.ConfigMap != nil:
			err = p.addConfigMap(files, s.ConfigMap.Name, s.ConfigMap.Items, s.ConfigMap.Optional, mode)
		case s.DownwardAPI != nil:
			err = p.addFields(files, s.DownwardAPI.Items, mode)
		case s.ServiceAccountToken != nil:
			err = p.addToken(ctx, files, s.ServiceAccountToken)
		default:
			err = fmt.Errorf("projections of this kind are not made here")
		}
		if err != nil {
			return nil, err
		}
	}
	return files, nil
}

func (p *pod) addSecret(files map[string]projected, name string, items []corev1.KeyToPath, optional *bool, mode *int32) error {
	secret, err := p.kubelet.secrets.Secrets(p.spec.Namespace).Get(name)
	if err != nil {
		return missing(err, optional)
	}
	keys := map[string]string{}
	for key, value := range secret.Data {
		keys[key] = string(value)
	}
	return addKeys(files, "secret", name, keys, items, optional, mode)
}

func (p *pod) addConfigMap(files map[string]projected, name string, items []corev1.KeyToPath, optional *bool, mode *int32) error {
	config, err := p.kubelet.configMaps.ConfigMaps(p.spec.Namespace).Get(name)
	if err != nil {
		return missing(err, optional)
	}
	return addKeys(files, "configmap", name, config.Data, items, optional, mode)
}

func missing(err error, optional *bool) error {
	if optional != nil && *optional {
		return nil
	}
	return err
}

func addKeys(files map[string]projected, kind, name string, keys map[string]string, items []corev1.KeyToPath, optional *bool, mode *int32) error {
	if len(items) == 0 {
		for key := range keys {
			items = append(items, corev1.KeyToPath{Key: key, Path: key})
		}
	}
	for _, i := range items {
		text, ok := keys[i.Key]
		if !ok {
			if err := missing(fmt.Errorf("references non-existent %s key: %s of %s", kind, i.Key, name), optional); err != nil {
				return err
			}
			continue
		}
		files[i.Path] = projected{text, fileMode(i.Mode, mode)}
	}
	return nil
}

func fileMode(modes ...*int32) os.FileMode {
	for _, m := range modes {
		if m != nil {
			return os.FileMode(*m)
		}
	}
	return 0o644
}

func (p *pod) addFields(files map[string]projected, items []corev1.DownwardAPIVolumeFile, mode *int32) error {
	for _, i := range items {
		if i.FieldRef == nil {
			return fmt.Errorf("resourceFieldRef of %s is not resolved here", i.Path)
		}
		text, err := p.field(i.FieldRef.FieldPath)
		if err != nil {
			return err
		}
		files[i.Path] = projected{text, fileMode(i.Mode, mode)}
	}
	return nil
}

// addToken adds a token of the pod's account, which is requested once.
func (p *pod) addToken(ctx context.Context, files map[string]projected, s *corev1.ServiceAccountTokenProjection) error {
	if p.token == "" {
		request := &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{
			ExpirationSeconds: s.ExpirationSeconds,
			BoundObjectRef:    &authenticationv1.BoundObjectReference{Kind: "Pod", APIVersion: "v1", Name: p.spec.Name, UID: p.spec.UID},
		}}
		if s.Audience != "" {
			request.Spec.Audiences = []string{s.Audience}
		}
		got, err := p.kubelet.client.CoreV1().ServiceAccounts(p.spec.Namespace).CreateToken(ctx, p.spec.Spec.ServiceAccountName, request, metav1.CreateOptions{})
		if err != nil {
			return err
		}
		p.token = got.Status.Token
	}
	token := p.token
	if p.kubelet.spoilTokens.Load() {
		token = "expired"
	}
	files[s.Path] = projected{token, 0o640}
	return nil
}
