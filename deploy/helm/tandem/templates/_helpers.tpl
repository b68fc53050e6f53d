{{/* tandem.fullname is the prefix of all names, at most 40 characters, so that suffixes fit. The end
     of a longer one is replaced by a hash, so that two releases do not share their objects. */}}
{{- define "tandem.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- $full := .Values.fullnameOverride -}}
{{- if not $full -}}
{{- $full = ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- end -}}
{{- if gt (len $full) 40 -}}
{{- $full = printf "%s-%s" ($full | trunc 31 | trimSuffix "-") (sha256sum $full | trunc 8) -}}
{{- end -}}
{{- trimSuffix "-" $full -}}
{{- end -}}

{{/* tandem.selector is the part of the labels that never changes. */}}
{{- define "tandem.selector" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{- define "tandem.labels" -}}
{{ include "tandem.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* tandem.metadata has the name with a suffix, and the labels: root, suffix, component. */}}
{{- define "tandem.metadata" -}}
name: "{{ include "tandem.fullname" .root }}{{ with .suffix }}-{{ . }}{{ end }}"
namespace: {{ .root.Release.Namespace | quote }}
labels:
  {{- include "tandem.labels" .root | nindent 2 }}
  {{- with .component }}
  app.kubernetes.io/component: {{ . }}
  {{- end }}
{{- end -}}

{{/* tandem.image is the reference of an image: root, image. */}}
{{- define "tandem.image" -}}
{{- $repository := default .root.Values.image.repository .image.repository -}}
{{- $digest := ternary .image.digest .root.Values.image.digest (or (not (empty .image.digest)) (not (empty .image.tag))) -}}
{{- if $digest -}}
{{ $repository }}@{{ $digest }}
{{- else -}}
{{ $repository }}:{{ default (default .root.Chart.AppVersion .root.Values.image.tag) .image.tag }}
{{- end -}}
{{- end -}}

{{/* tandem.merge changes the map "into": keys of "from" replace its own, maps key by key. Sprig's
     mergeOverwrite would skip false, 0 and "". */}}
{{- define "tandem.merge" -}}
{{- $into := .into -}}
{{- range $key, $value := .from -}}
{{- if and (kindIs "map" $value) (kindIs "map" (get $into $key)) -}}
{{- include "tandem.merge" (dict "into" (get $into $key) "from" $value) -}}
{{- else -}}
{{- $_ := set $into $key $value -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* tandem.grace is the time between the deletion of a pod and SIGKILL, in seconds: the sleep, the
     drain and fifteen seconds for the end of the process. */}}
{{- define "tandem.grace" -}}
{{- $least := add (int .s.preStopSeconds) (int .s.shutdownSeconds) 5 -}}
{{- $given := int .s.terminationGracePeriodSeconds -}}
{{- if not $given -}}
{{- add $least 10 -}}
{{- else if lt $given (int $least) -}}
{{- fail (printf "%s.terminationGracePeriodSeconds is %d: want at least %d (preStopSeconds + shutdownSeconds + 5), or running streams are killed" .path $given $least) -}}
{{- else -}}
{{- $given -}}
{{- end -}}
{{- end -}}

{{- define "tandem.gossip" -}}
{{ include "tandem.fullname" . }}-gossip.{{ .Release.Namespace }}.svc.{{ .Values.clusterDomain }}
{{- end -}}

{{/* tandem.serviceAccount is a name: root, s, suffix. */}}
{{- define "tandem.serviceAccount" -}}
{{- if .s.serviceAccount.create -}}
{{- default (printf "%s-%s" (include "tandem.fullname" .root) .suffix) .s.serviceAccount.name -}}
{{- else -}}
{{- default "default" .s.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{/* tandem.podSecurity and tandem.containerSecurity satisfy the Restricted pod security standard. */}}
{{- define "tandem.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "tandem.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{/* tandem.security is a securityContext: the defaults' template, and the map of the values. */}}
{{- define "tandem.security" -}}
{{- $security := include .defaults . | fromYaml -}}
{{- include "tandem.merge" (dict "into" $security "from" .from) -}}
{{- range $key, $value := $security }}
{{ $key }}: {{ if kindIs "float64" $value }}{{ int64 $value }}{{ else }}{{ toJson $value }}{{ end }}
{{- end -}}
{{- end -}}

{{/* tandem.tls is the volume with the certificates of a role, gateway or node: root, role. */}}
{{- define "tandem.tls" -}}
{{- $c := .root.Values.certificates -}}
{{- $name := include "tandem.fullname" .root -}}
- name: tls
  {{- if eq $c.mode "job" }}
  secret:
    secretName: {{ $name }}-certs
    defaultMode: 0440
    items:
      - {key: ca.crt, path: ca.crt}
      - {key: gossip.secret, path: gossip.secret}
      - {key: {{ .role }}.crt, path: node.crt}
      - {key: {{ .role }}.key, path: node.key}
  {{- else if eq $c.mode "certManager" }}
  projected:
    defaultMode: 0440
    sources:
      - secret:
          name: {{ $name }}-{{ .role }}-tls
          items:
            - {key: ca.crt, path: ca.crt}
            - {key: tls.crt, path: node.crt}
            - {key: tls.key, path: node.key}
      - secret:
          name: {{ default (printf "%s-gossip" $name) $c.certManager.gossipSecret | quote }}
          items:
            - {key: gossip.secret, path: gossip.secret}
  {{- else }}
  secret:
    secretName: {{ ternary $c.existingSecrets.gateway $c.existingSecrets.nodes (eq .role "gateway") | quote }}
    defaultMode: 0440
  {{- end }}
{{- end -}}

{{/* tandem.query is the PromQL of a pool's load: root, name, role. */}}
{{- define "tandem.query" -}}
sum({{ ternary "tandem:prefill_queue_seconds" "tandem:decode_pressure" (eq .role "prefill") }}{namespace={{ .root.Release.Namespace | quote }}, fleet={{ include "tandem.fullname" .root | quote }}, pool={{ .name | quote }}})
{{- end -}}

{{/* tandem.check fails for values that no schema can refuse. */}}
{{- define "tandem.check" -}}
{{- $v := .Values -}}
{{- $pools := 0 -}}
{{- range $name, $pool := $v.pools -}}
{{- if dig "enabled" true $pool -}}
{{- $pools = add $pools 1 -}}
{{- if has $name (list "gateway" "gossip" "certs" "node") -}}
{{- fail (printf "pools.%s: the name is used by the chart, choose another" $name) -}}
{{- end -}}
{{- $model := default $v.nodes.model $pool.model -}}
{{- if and $model (not (hasKey $v.models $model)) -}}
{{- fail (printf "pools.%s.model is %q, which models does not have (it has: %s)" $name $model (keys $v.models | sortAlpha | join ", ")) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $name, $model := $v.models -}}
{{- if ne 1 (len (pick $model "pvc" "hostPath" "image" "hub")) -}}
{{- fail (printf "models.%s: give one of pvc, hostPath, image and hub" $name) -}}
{{- end -}}
{{- end -}}
{{- $upstreams := or $v.gateway.upstreams $v.gateway.prefillUpstreams $v.gateway.decodeUpstreams -}}
{{- if and $v.nodes.enabled (not $pools) (not $upstreams) -}}
{{- fail "every pool is disabled: enable one, or set nodes.enabled to false and gateway.upstreams" -}}
{{- end -}}
{{- if and (not $v.nodes.enabled) (not $upstreams) -}}
{{- fail "nodes.enabled is false: the gateway needs gateway.upstreams" -}}
{{- end -}}
{{- if and $v.nodes.enabled (eq $v.certificates.mode "secret") (or (not $v.certificates.existingSecrets.gateway) (not $v.certificates.existingSecrets.nodes)) -}}
{{- fail "certificates.mode is secret: give certificates.existingSecrets.gateway and certificates.existingSecrets.nodes" -}}
{{- end -}}
{{- if and $v.monitoring.podMonitor.enabled $v.gateway.clientTLS.existingSecret (not (int $v.gateway.adminPort)) -}}
{{- fail "monitoring.podMonitor and gateway.clientTLS: set gateway.adminPort, where Prometheus reads the gateways' metrics without TLS" -}}
{{- end -}}
{{- if and $v.gateway.httpRoute.enabled (not $v.gateway.httpRoute.parentRefs) -}}
{{- fail "gateway.httpRoute.enabled: give gateway.httpRoute.parentRefs, the Gateways that the route belongs to" -}}
{{- end -}}
{{- end -}}
