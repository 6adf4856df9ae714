{{/*
"tandem.schema" checks a value against a JSON schema (draft 7; the keywords that files/config.schema.json has) and returns a line for each
mistake. Helm applies a schema to values only, and several configurations are texts. Its arguments are: schema, value, path, whether unknown
keys are accepted, definitions.
*/}}
{{- define "tandem.schema" -}}
{{- $schema := index . 0 -}}
{{- $value := index . 1 -}}
{{- $at := index . 2 -}}
{{- $lenient := index . 3 -}}
{{- $definitions := index . 4 -}}
{{- with get $schema "$ref" -}}
{{- $schema = get $definitions (base .) -}}
{{- end -}}
{{- $kind := get (dict "invalid" "null" "map" "object" "slice" "array" "string" "string" "bool" "boolean") (kindOf $value) | default "number" -}}
{{- if and (eq $kind "number") (eq (float64 $value) (floor $value)) -}}
{{- $kind = "integer" -}}
{{- end -}}
{{- $types := get $schema "type" -}}
{{- if kindIs "string" $types -}}
{{- $types = list $types | compact -}}
{{- end -}}
{{- $text := toJson $value -}}
{{- $mistake := printf "%s: %s is not %s\n" $at $text (get $schema "description" | default (printf "of type %s" (join " or " $types))) -}}
{{- $isType := or (not $types) (has $kind $types) (and (eq $kind "integer") (has "number" $types)) -}}
{{- if not $isType -}}
{{- $mistake -}}
{{- else -}}
{{- with get $schema "enum" -}}
{{- $known := list -}}
{{- range . -}}
{{- $known = append $known (toJson .) -}}
{{- end -}}
{{- if not (has $text $known) -}}
{{- printf "%s: %s is not %s\n" $at $text (get $schema "description" | default (printf "one of %s" (join ", " (without $known "null" "\"\"")))) -}}
{{- end -}}
{{- end -}}
{{- if and (hasKey $schema "const") (ne $text (toJson (get $schema "const"))) -}}
{{- printf "%s: %s is not %s\n" $at $text (toJson (get $schema "const")) -}}
{{- end -}}
{{- if eq $kind "string" -}}
{{- $tooLong := and (hasKey $schema "maxLength") (gt (len $value) (int (get $schema "maxLength"))) -}}
{{- $tooShort := and (hasKey $schema "minLength") (lt (len $value) (int (get $schema "minLength"))) -}}
{{- if or $tooLong $tooShort (and (hasKey $schema "pattern") (not (regexMatch (get $schema "pattern") $value))) -}}
{{- $mistake -}}
{{- end -}}
{{- else if or (eq $kind "integer") (eq $kind "number") -}}
{{- $tooSmall := and (hasKey $schema "minimum") (lt (float64 $value) (float64 (get $schema "minimum"))) -}}
{{- if or $tooSmall (and (hasKey $schema "maximum") (gt (float64 $value) (float64 (get $schema "maximum")))) -}}
{{- $mistake -}}
{{- end -}}
{{- else if eq $kind "array" -}}
{{- $tooMany := and (hasKey $schema "maxItems") (gt (len $value) (int (get $schema "maxItems"))) -}}
{{- $found := not (hasKey $schema "contains") -}}
{{- range $i, $item := $value -}}
{{- with get $schema "items" -}}
{{- include "tandem.schema" (list . $item (printf "%s[%d]" $at $i) $lenient $definitions) -}}
{{- end -}}
{{- with get $schema "contains" -}}
{{- if not (include "tandem.schema" (list . $item $at $lenient $definitions)) -}}
{{- $found = true -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if or $tooMany (not $found) (and (hasKey $schema "minItems") (lt (len $value) (int (get $schema "minItems")))) -}}
{{- $mistake -}}
{{- end -}}
{{- else if eq $kind "object" -}}
{{- range get $schema "required" | default list -}}
{{- if not (hasKey $value .) -}}
{{- printf "%s\n" (printf "%s.%s: is required %s" $at . (get $schema "description" | default "") | trim) -}}
{{- end -}}
{{- end -}}
{{- $properties := get $schema "properties" | default dict -}}
{{- range $key, $item := $value -}}
{{- if hasKey $properties $key -}}
{{- include "tandem.schema" (list (get $properties $key) $item (printf "%s.%s" $at $key) $lenient $definitions) -}}
{{- else if and (eq (toJson (get $schema "additionalProperties")) "false") (not $lenient) -}}
{{- printf "%s.%s: unknown key (correct it, or set unknownConfigKeys: Warn)\n" $at $key -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range get $schema "allOf" | default list -}}
{{- include "tandem.schema" (list . $value $at $lenient $definitions) -}}
{{- end -}}
{{- range $keyword := list "anyOf" "oneOf" -}}
{{- if hasKey $schema $keyword -}}
{{- $right := 0 -}}
{{- range get $schema $keyword -}}
{{- if not (include "tandem.schema" (list . $value $at $lenient $definitions)) -}}
{{- $right = add1 $right -}}
{{- end -}}
{{- end -}}
{{- if or (eq (int $right) 0) (and (eq $keyword "oneOf") (gt (int $right) 1)) -}}
{{- $mistake -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if hasKey $schema "not" -}}
{{- if not (include "tandem.schema" (list (get $schema "not") $value $at $lenient $definitions)) -}}
{{- $mistake -}}
{{- end -}}
{{- end -}}
{{- if hasKey $schema "if" -}}
{{- if not (include "tandem.schema" (list (get $schema "if") $value $at $lenient $definitions)) -}}
{{- include "tandem.schema" (list (get $schema "then") $value $at $lenient $definitions) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* The mistakes of all configurations, with their paths. */}}
{{- define "tandem.config.mistakes" -}}
{{- $schema := .Files.Get "files/config.schema.json" | fromJson -}}
{{- $definitions := get $schema "definitions" -}}
{{- if ne .Values.resourceName "nvidia.com/gpu" -}}
{{- $_ := unset (get $definitions "mpsShared") "if" -}}
{{- end -}}
{{- $lenient := eq (toString .Values.unknownConfigKeys) "Warn" -}}
{{- $kind := include "tandem.config" . -}}
{{- if eq $kind "one" -}}
{{- include "tandem.schema" (list $schema (omit .Values.config "name" "map" "default" "fallbackStrategies") "config" $lenient $definitions) -}}
{{- else if eq $kind "several" -}}
{{- range $name, $text := .Values.config.map -}}
{{- $at := printf "config.map.%s" $name -}}
{{- $config := $text -}}
{{- if kindIs "string" $text -}}
{{- $config = fromYaml $text -}}
{{- end -}}
{{- $documents := 0 -}}
{{- if kindIs "string" $text -}}
{{- range regexSplit "(?m)^---([ \t\r]|$)" $text -1 -}}
{{- if regexMatch "(?m)^[ \t]*[^#%\\s]" . -}}
{{- $documents = add1 $documents -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if gt (int $documents) 1 -}}
{{- printf "%s: more than one YAML document\n" $at -}}
{{- else if and (eq (len $config) 1) (hasPrefix "error " (toString (get $config "Error"))) -}}
{{- printf "%s: %s\n" $at (get $config "Error") -}}
{{- else -}}
{{- include "tandem.schema" (list $schema $config $at $lenient $definitions) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}
