{{/* tandem.deployment is the Deployment of the gateways or of a pool, with its settings and its
     budget of disruptions.

       root    the chart's context
       role    gateway, prefill or decode
       name    suffix of the names: gateway, or that of the pool
       path    of the settings in the values, for errors
       s       the settings: gateway, or nodes with the pool's own */}}
{{- define "tandem.deployment" -}}
{{- $root := .root -}}{{- $s := .s -}}{{- $role := .role -}}
{{- $gateway := eq $role "gateway" -}}
{{- $name := printf "%s-%s" (include "tandem.fullname" $root) .name -}}
{{- $cluster := or (not $gateway) $root.Values.nodes.enabled -}}
{{- $admin := and $gateway (int (default 0 $s.adminPort)) -}}
{{- $https := and $gateway $s.clientTLS.existingSecret -}}
{{- $probe := dict "port" "http" "scheme" (ternary "HTTPS" "HTTP" (not (empty $https))) -}}
{{- if $admin }}{{- $probe = dict "port" "admin" "scheme" "HTTP" -}}{{- end -}}
{{- $model := dict -}}
{{- if and (not $gateway) $s.model }}{{- $model = get $root.Values.models $s.model -}}{{- end -}}
{{- $autoscaled := and (not $gateway) $s.autoscaling.type -}}
{{- $rootUser := and (not $gateway) $s.rdma.ipcLock -}}
{{- $selector := printf "%s\napp.kubernetes.io/component: %s" (include "tandem.selector" $root) $role -}}
{{- if not $gateway }}{{- $selector = printf "%s\ntandem/pool: %q" $selector .name -}}{{- end -}}
{{- $config := toYaml $s.config -}}
apiVersion: v1
kind: ConfigMap
metadata:
  {{- include "tandem.metadata" (dict "root" $root "suffix" .name "component" $role) | nindent 2 }}
data:
  settings.yaml: |
    {{- $config | nindent 4 }}
---
apiVersion: apps/v1
kind: Deployment
metadata:
  {{- include "tandem.metadata" (dict "root" $root "suffix" .name "component" $role) | nindent 2 }}
spec:
  {{- if not $autoscaled }}
  replicas: {{ int $s.replicas }}
  {{- end }}
  {{- /* A model may load for as long as startupSeconds, which is no failure of a rollout. */}}
  progressDeadlineSeconds: {{ add 300 (int $s.startupSeconds) }}
  revisionHistoryLimit: 5
  strategy:
    {{- toYaml $s.strategy | nindent 4 }}
  selector:
    matchLabels:
      {{- $selector | nindent 6 }}
  template:
    metadata:
      labels:
        {{- $selector | nindent 8 }}
        app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
        {{- if $cluster }}
        tandem/member: "true"
        {{- end }}
        {{- with $root.Values.commonLabels }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
        {{- with $s.podLabels }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      annotations:
        checksum/settings: {{ sha256sum $config }}
        {{- if $root.Values.monitoring.annotations }}
        prometheus.io/scrape: "true"
        prometheus.io/path: /metrics
        prometheus.io/port: {{ include "tandem.metricsPort" . | quote }}
        {{- if and $https (not $admin) }}
        prometheus.io/scheme: https
        {{- end }}
        {{- end }}
        {{- with $s.podAnnotations }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
    spec:
      serviceAccountName: {{ include "tandem.serviceAccount" (dict "root" $root "s" $s "suffix" (ternary "gateway" "nodes" $gateway)) | quote }}
      automountServiceAccountToken: {{ and $gateway (eq (include "tandem.discovers" $root) "true") }}
      enableServiceLinks: false
      terminationGracePeriodSeconds: {{ include "tandem.grace" (dict "s" $s "path" .path) }}
      securityContext:
        {{- include "tandem.security" (dict "defaults" "tandem.podSecurity" "from" $s.podSecurityContext) | trim | nindent 8 }}
      {{- with $root.Values.imagePullSecrets }}
      imagePullSecrets:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with $s.priorityClassName }}
      priorityClassName: {{ . | quote }}
      {{- end }}
      {{- with $s.runtimeClassName }}
      runtimeClassName: {{ . | quote }}
      {{- end }}
      {{- with $s.nodeSelector }}
      nodeSelector:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with $s.tolerations }}
      tolerations:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- if $s.affinity }}
      affinity:
        {{- toYaml $s.affinity | nindent 8 }}
      {{- else if and (not $gateway) $s.near.topologyKey }}
      affinity:
        podAffinity:
          preferredDuringSchedulingIgnoredDuringExecution:
            - weight: {{ int $s.near.weight }}
              podAffinityTerm:
                topologyKey: {{ $s.near.topologyKey | quote }}
                labelSelector:
                  matchLabels:
                    {{- include "tandem.selector" $root | nindent 20 }}
                    app.kubernetes.io/component: {{ ternary "decode" "prefill" (eq $role "prefill") }}
      {{- end }}
      {{- if $s.spread.topologyKey }}
      topologySpreadConstraints:
        - topologyKey: {{ $s.spread.topologyKey | quote }}
          maxSkew: {{ int $s.spread.maxSkew }}
          whenUnsatisfiable: {{ $s.spread.whenUnsatisfiable }}
          labelSelector:
            matchLabels:
              {{- $selector | nindent 14 }}
          matchLabelKeys: [pod-template-hash]
      {{- end }}
      {{- if and (not $gateway) $s.resourceClaims }}
      resourceClaims:
        {{- toYaml $s.resourceClaims | nindent 8 }}
      {{- end }}
      {{- if $model.hub }}
      initContainers:
        - name: pull
          image: {{ include "tandem.image" (dict "root" $root "image" $s.image) | quote }}
          imagePullPolicy: {{ default $root.Values.image.pullPolicy $s.image.pullPolicy }}
          args: [pull, {{ printf "%s:%s" $model.hub.repository (default "main" $model.hub.revision) | quote }}]
          env:
            {{- include "tandem.hubEnv" $model.hub | nindent 12 }}
          {{- with $model.hub.envFrom }}
          envFrom:
            {{- toYaml . | nindent 12 }}
          {{- end }}
          securityContext:
            {{- include "tandem.security" (dict "defaults" "tandem.containerSecurity" "from" dict) | trim | nindent 12 }}
          volumeMounts:
            - {name: model, mountPath: /model}
            - {name: tmp, mountPath: /tmp}
      {{- end }}
      containers:
        - name: tandem
          image: {{ include "tandem.image" (dict "root" $root "image" $s.image) | quote }}
          imagePullPolicy: {{ default $root.Values.image.pullPolicy $s.image.pullPolicy }}
          args:
            - {{ $role }}
            - --config=/etc/tandem/settings.yaml
            - --node-name=$(POD_NAME)
            - --shutdown-timeout={{ int $s.shutdownSeconds }}s
            {{- if $gateway }}
            - {{ printf "--host=%s" $s.listen | quote }}
            {{- if $https }}
            - --ssl-certfile=/etc/tandem/clients/tls.crt
            - --ssl-keyfile=/etc/tandem/clients/tls.key
            {{- end }}
            {{- if or $admin (not $https) }}
            - --insecure
            {{- end }}
            {{- if $s.apiKeys.existingSecret }}
            - --api-key-file=/etc/tandem/keys/keys
            {{- end }}
            - {{ printf "--allowed-hosts=%s" (include "tandem.hosts" $root) | quote }}
            {{- if $admin }}
            - "--admin-listen={{ if contains ":" $s.listen }}[{{ $s.listen }}]{{ else }}{{ $s.listen }}{{ end }}:{{ int $s.adminPort }}"
            {{- end }}
            {{- range $s.upstreams }}
            - {{ printf "--upstream=%s" . | quote }}
            {{- end }}
            {{- range $s.prefillUpstreams }}
            - {{ printf "--upstream-prefill=%s" . | quote }}
            {{- end }}
            {{- range $s.decodeUpstreams }}
            - {{ printf "--upstream-decode=%s" . | quote }}
            {{- end }}
            {{- if $cluster }}
            - --advertise=$(POD_IP)
            {{- end }}
            {{- else }}
            - --host=$(POD_IP)
            {{- end }}
            {{- if $cluster }}
            - --tls-dir=/etc/tandem/tls
            - {{ printf "--join=%s" (include "tandem.gossip" $root) | quote }}
            {{- end }}
            {{- if $model.hub }}
            - {{ printf "--model=%s" $model.hub.repository | quote }}
            {{- with $model.hub.revision }}
            - {{ printf "--revision=%s" . | quote }}
            {{- end }}
            {{- else if $model }}
            - {{ printf "--model=/model%s" (ternary (printf "/%s" (trimPrefix "/" (default "" $model.path))) "" (not (empty $model.path))) | quote }}
            {{- end }}
            {{- if $model }}
            - {{ printf "--served-model-name=%s" (default $s.model $model.servedModelName) | quote }}
            {{- end }}
            {{- range $s.extraArgs }}
            - {{ . | quote }}
            {{- end }}
          env:
            - name: POD_NAME
              valueFrom: {fieldRef: {fieldPath: metadata.name}}
            - name: POD_IP
              valueFrom: {fieldRef: {fieldPath: status.podIP}}
            {{- if $model.hub }}
            - {name: HF_HUB_CACHE, value: /model}
            {{- end }}
            {{- with $s.env }}
            {{- toYaml . | nindent 12 }}
            {{- end }}
          {{- with $s.envFrom }}
          envFrom:
            {{- toYaml . | nindent 12 }}
          {{- end }}
          ports:
            {{- if $gateway }}
            - {name: http, containerPort: 8000}
            {{- if $admin }}
            - {name: admin, containerPort: {{ int $s.adminPort }}}
            {{- end }}
            {{- if $cluster }}
            - {name: nats, containerPort: 4222}
            {{- end }}
            {{- else }}
            - {name: http, containerPort: {{ ternary 7301 7302 (eq $role "prefill") }}}
            - {name: rpc, containerPort: {{ ternary 7101 7102 (eq $role "prefill") }}}
            {{- if eq $role "decode" }}
            - {name: kv, containerPort: 7202}
            {{- end }}
            {{- end }}
            {{- if $cluster }}
            - {name: gossip, containerPort: 7946}
            - {name: gossip-udp, containerPort: 7946, protocol: UDP}
            {{- end }}
          startupProbe:
            httpGet: {path: /livez, port: {{ $probe.port }}, scheme: {{ $probe.scheme }}}
            periodSeconds: 5
            timeoutSeconds: 5
            failureThreshold: {{ max 1 (div (add 4 (int $s.startupSeconds)) 5) }}
          livenessProbe:
            httpGet: {path: /livez, port: {{ $probe.port }}, scheme: {{ $probe.scheme }}}
            {{- toYaml $s.probes.liveness | nindent 12 }}
          readinessProbe:
            httpGet: {path: /readyz, port: {{ $probe.port }}, scheme: {{ $probe.scheme }}}
            {{- toYaml $s.probes.readiness | nindent 12 }}
          {{- if int $s.preStopSeconds }}
          lifecycle:
            preStop: {sleep: {seconds: {{ int $s.preStopSeconds }}}}
          {{- end }}
          {{- with include "tandem.resources" (dict "s" $s "gateway" $gateway) }}
          {{- . | nindent 10 }}
          {{- end }}
          securityContext:
            {{- $over := dict -}}
            {{- if $rootUser }}
            {{- $over = dict "capabilities" (dict "drop" (list "ALL") "add" (list "IPC_LOCK")) "runAsUser" 0 "runAsNonRoot" false -}}
            {{- end -}}
            {{- include "tandem.merge" (dict "into" $over "from" $s.securityContext) -}}
            {{- include "tandem.security" (dict "defaults" "tandem.containerSecurity" "from" $over) | trim | nindent 12 }}
          volumeMounts:
            - {name: settings, mountPath: /etc/tandem/settings.yaml, subPath: settings.yaml, readOnly: true}
            - {name: tmp, mountPath: /tmp}
            {{- if $cluster }}
            - {name: tls, mountPath: /etc/tandem/tls, readOnly: true}
            {{- end }}
            {{- if $https }}
            - {name: clients, mountPath: /etc/tandem/clients, readOnly: true}
            {{- end }}
            {{- if and $gateway $s.apiKeys.existingSecret }}
            - {name: keys, mountPath: /etc/tandem/keys, readOnly: true}
            {{- end }}
            {{- if $model }}
            - {name: model, mountPath: /model{{ if not $model.hub }}, readOnly: true{{ end }}}
            {{- end }}
            {{- if and (not $gateway) $s.shm }}
            - {name: shm, mountPath: /dev/shm}
            {{- end }}
            {{- with $s.extraVolumeMounts }}
            {{- toYaml . | nindent 12 }}
            {{- end }}
      volumes:
        - name: settings
          configMap: {name: {{ $name }}}
        - name: tmp
          emptyDir: {}
        {{- if $cluster }}
        {{- include "tandem.tls" (dict "root" $root "role" (ternary "gateway" "node" $gateway)) | nindent 8 }}
        {{- end }}
        {{- if $https }}
        - name: clients
          secret: {secretName: {{ $s.clientTLS.existingSecret | quote }}, defaultMode: 0440}
        {{- end }}
        {{- if and $gateway $s.apiKeys.existingSecret }}
        - name: keys
          secret:
            secretName: {{ $s.apiKeys.existingSecret | quote }}
            defaultMode: 0440
            items: [{key: {{ $s.apiKeys.key | quote }}, path: keys}]
        {{- end }}
        {{- if $model }}
        - name: model
          {{- include "tandem.modelVolume" $model | nindent 10 }}
        {{- end }}
        {{- if and (not $gateway) $s.shm }}
        - name: shm
          emptyDir: {medium: Memory, sizeLimit: {{ $s.shm | quote }}}
        {{- end }}
        {{- with $s.extraVolumes }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- with $s.extraPodSpec }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
{{- $many := gt (int (default 0 $s.replicas)) 1 -}}
{{- if $autoscaled }}{{- $many = gt (int $s.autoscaling.maxReplicas) 1 -}}{{- end }}
{{- if and $s.podDisruptionBudget.enabled $many }}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  {{- include "tandem.metadata" (dict "root" $root "suffix" .name "component" $role) | nindent 2 }}
spec:
  maxUnavailable: {{ $s.podDisruptionBudget.maxUnavailable }}
  selector:
    matchLabels:
      {{- $selector | nindent 6 }}
{{- end }}
{{- end -}}

{{/* tandem.metricsPort is the number of the port with /metrics. */}}
{{- define "tandem.metricsPort" -}}
{{- if eq .role "gateway" -}}
{{- default 8000 (int .s.adminPort) -}}
{{- else -}}
{{- ternary 7301 7302 (eq .role "prefill") -}}
{{- end -}}
{{- end -}}

{{/* tandem.hosts are the names by which clients within the cluster, and those of a route, reach the
     gateways. Gateways without API keys refuse all others. */}}
{{- define "tandem.hosts" -}}
{{- $name := include "tandem.fullname" . -}}
{{- $service := printf "%s.%s" $name .Release.Namespace -}}
{{- $names := list $name $service (printf "%s.svc" $service) (printf "%s.svc.%s" $service .Values.clusterDomain) -}}
{{- if .Values.gateway.httpRoute.enabled -}}
{{- range .Values.gateway.httpRoute.hostnames }}{{- $names = append $names . -}}{{- end -}}
{{- end -}}
{{- concat $names .Values.gateway.allowedHosts | uniq | join "," -}}
{{- end -}}

{{/* tandem.discovers is true if an upstream is a Service that the gateway watches. */}}
{{- define "tandem.discovers" -}}
{{- not (empty (include "tandem.namespaces" .)) -}}
{{- end -}}

{{/* tandem.namespaces are the namespaces of the Services among the upstreams, a line each. */}}
{{- define "tandem.namespaces" -}}
{{- $namespaces := list -}}
{{- range concat .Values.gateway.upstreams .Values.gateway.prefillUpstreams .Values.gateway.decodeUpstreams -}}
{{- if hasPrefix "k8s" . -}}
{{- $service := regexReplaceAll "^k8s(\\+https?)?:(//)?" . "" -}}
{{- $namespaces = append $namespaces (ternary (splitList "/" $service | first) $.Release.Namespace (contains "/" $service)) -}}
{{- end -}}
{{- end -}}
{{- $namespaces | uniq | join "\n" -}}
{{- end -}}

{{/* tandem.resources has the devices among the limits. */}}
{{- define "tandem.resources" -}}
{{- $r := deepCopy .s.resources -}}
{{- if not .gateway -}}
{{- $limits := default dict $r.limits -}}
{{- if int .s.gpus }}{{- $_ := set $limits .s.gpuResource (int .s.gpus) -}}{{- end -}}
{{- if int .s.rdma.count }}{{- $_ := set $limits .s.rdma.resource (int .s.rdma.count) -}}{{- end -}}
{{- if $limits }}{{- $_ := set $r "limits" $limits -}}{{- end -}}
{{- if .s.resourceClaims -}}
{{- $claims := list -}}
{{- range .s.resourceClaims }}{{- $claims = append $claims (dict "name" .name) -}}{{- end -}}
{{- $_ := set $r "claims" $claims -}}
{{- end -}}
{{- end -}}
{{- with $r -}}
resources:
  {{- toYaml . | nindent 2 }}
{{- end -}}
{{- end -}}

{{- define "tandem.modelVolume" -}}
{{- if .pvc -}}
persistentVolumeClaim: {claimName: {{ .pvc.claimName | quote }}, readOnly: {{ .pvc.readOnly | default false }}}
{{- else if .hostPath -}}
hostPath: {path: {{ .hostPath.path | quote }}, type: Directory}
{{- else if .image -}}
image:
  reference: {{ .image.reference | quote }}
  pullPolicy: {{ default "IfNotPresent" .image.pullPolicy }}
{{- else if .hub.claimName -}}
persistentVolumeClaim: {claimName: {{ .hub.claimName | quote }}}
{{- else -}}
emptyDir: {{ if .hub.sizeLimit }}{sizeLimit: {{ .hub.sizeLimit | quote }}}{{ else }}{}{{ end }}
{{- end -}}
{{- end -}}

{{- define "tandem.hubEnv" -}}
- {name: HF_HUB_CACHE, value: /model}
{{- with .endpoint }}
- {name: HF_ENDPOINT, value: {{ . | quote }}}
{{- end }}
{{- with .tokenSecret }}
- name: HF_TOKEN
  valueFrom: {secretKeyRef: {name: {{ .name | quote }}, key: {{ default "token" .key | quote }}}}
{{- end }}
{{- end -}}
