{{- define "osfl.name" -}}
{{ .Release.Name }}-osfl
{{- end }}

{{- define "osfl.image" -}}
{{ with .Values.images.repository }}{{ . }}/{{ end }}{{ .image }}:{{ .Values.images.tag }}
{{- end }}

{{- define "osfl.pod" -}}
# Code of runs is executed here, and must not reach the cluster's API
automountServiceAccountToken: false
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "osfl.container" -}}
imagePullPolicy: {{ .Values.images.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{- define "osfl.volumeClaim" -}}
metadata: {name: {{ .name }}}
spec:
  accessModes: [ReadWriteOnce]
  resources: {requests: {storage: {{ .storage }}}}
{{- end }}
