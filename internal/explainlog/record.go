package explainlog

import (
	"regexp"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"
)

// record is one line of a log, split into its parts. All of its texts are printable.
type record struct {
	level   string // DEBUG, INFO, WARNING, ERROR or CRITICAL; empty: none
	process string
	when    string
	at      time.Duration // since the start of the year or of the log's clock; 0: unknown
	source  string        // file and line
	module  string        // file without its ending
	msg     string        // with its indentation
	command bool          // follows a shell's prompt
	binary  bool          // hardly any of it is text
	json    map[string]string
}

var (
	ansi = regexp.MustCompile("\x1b\\[[0-9;?]*[ -/]*[@-~]|\x1b\\][^\x07\x1b]*(?:\x07|\x1b\\\\)")
	// apiKey finds keys in command lines and in the list of arguments: pages are sent to others.
	apiKey = regexp.MustCompile(`((?:--(?:api[-_]key)[ =]+["']?|['"]?\bapi_key['"]?[:=] ?\[?["']))[^\s'",\])]+`)
	// glued finds the end of a progress bar that a record follows without a newline.
	glued     = regexp.MustCompile(`(?:it/s|s/it|[0-9?]s?)\](?:\([A-Z]\w*[^()]*\) )?(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d `)
	quoted    = regexp.MustCompile("^(?:> ?)+")
	container = regexp.MustCompile(`^[A-Za-z0-9][\w.-]{0,63} *\| ?`)
	isoTime   = regexp.MustCompile(`^\[?(\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d)(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?\]?:?(?: std(?:out|err) [FP])? +`)
	syslog    = regexp.MustCompile(`^[A-Z][a-z]{2} +\d+ (\d\d:\d\d:\d\d) \S+ [\w.@/-]+(?:\[\d+\])?: `)
	process   = regexp.MustCompile(`^\(((?:[A-Za-z][^=]{0,100}? )?(?:pid|rank|ip)=[^()]{1,100})\) ?`)
	bracketed = regexp.MustCompile(`^\[(?i:debug|info|warn|warning|error|critical)\] (?:\([A-Z][a-z]+\) )?`)
	rank      = regexp.MustCompile(`^\[rank\d+\]:? ?`)
	native    = regexp.MustCompile(`^(DEBUG|INFO|WARNING|ERROR|CRITICAL) +(\d\d-\d\d \d\d:\d\d:\d\d)(?:\.\d+)?(?: \[([^\[\]\s:]+):(\d+)\]| ([\w./-]+\.py):(\d+)\])?(?: (.*))?$`)
	uvicorn   = regexp.MustCompile(`^(DEBUG|INFO|WARNING|ERROR|CRITICAL): +(.*)$`)
	loggerOf  = regexp.MustCompile(`^\[([\w.:-]+):(DEBUG|INFO|WARNING|ERROR|CRITICAL)\] \(([\w./-]+):(\d+)\): (.*)$`)
	ray       = regexp.MustCompile(`^(?:- )?(DEBUG|INFO|WARNING|ERROR|CRITICAL) ([\w./-]+\.py):(\d+) -- (.*)$`)
	dashed    = regexp.MustCompile(`^(?:[-|] ?)?(?:([\w.]+) [-|] )?(DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL|FATAL)(?: ?[-|:])? +(?:([\w.]+) ?[-|:] )?(.*)$`)
	prompt    = regexp.MustCompile(`^(?:\([\w.-]+\) ?)?(?:[\w.-]+@[\w.-]+:[^#$]*[#$] |[$#%] )(.*)$`)
	glog      = regexp.MustCompile(`^\[?([IWEF])(\d{3,4}) (\d\d:\d\d:\d\d)(?:\.\d+)? +(?:\d+ )?([\w./-]+):(\d+)\] (.*)$`)
)

// split returns the records of a line.
func split(line []byte) []record {
	var all []record
	for _, part := range strings.Split(strings.TrimRight(string(line), "\r"), "\r") { // bars are drawn over
		if part == "" && len(all) > 0 {
			continue
		}
		for {
			if !strings.Contains(part, "s]") && !strings.Contains(part, "it]") {
				break
			}
			at := glued.FindStringIndex(part)
			if at == nil {
				break
			}
			end := at[0] + strings.IndexByte(part[at[0]:], ']') + 1
			all = append(all, parse(part[:end]))
			part = part[end:]
		}
		all = append(all, parse(part))
		if len(all) > 64 {
			break
		}
	}
	return all
}

// clean returns text that a terminal shows as it is: colours are dropped, other control characters
// and bytes that are no UTF-8 are written as escapes. bad is how many those were.
func clean(s string) (text string, bad int) {
	if strings.IndexByte(s, 0x1b) >= 0 {
		s = ansi.ReplaceAllString(s, "")
	}
	plain := true
	for i := 0; i < len(s) && plain; i++ {
		plain = s[i] >= 0x20 && s[i] < 0x7f
	}
	if plain {
		return s, 0
	}
	var b strings.Builder
	for i := 0; i < len(s); {
		r, n := utf8.DecodeRuneInString(s[i:])
		switch {
		case r == '\t':
			b.WriteString("    ")
		case r == utf8.RuneError && n == 1:
			bad++
			b.WriteString(`\x` + strconv.FormatUint(uint64(s[i])|0x100, 16)[1:])
		case r == 0xa0 || r == 0xfeff: // spaces and marks that editors leave
			b.WriteByte(' ')
		case strconv.IsPrint(r):
			b.WriteString(s[i : i+n])
		default:
			bad++
			q := strconv.QuoteRuneToASCII(r)
			b.WriteString(q[1 : len(q)-1])
		}
		i += n
	}
	return b.String(), bad
}

// parse splits one record.
func parse(raw string) record {
	text, bad := clean(raw)
	if strings.Contains(text, "api") {
		text = apiKey.ReplaceAllString(text, "${1}[secret]")
	}
	r := record{binary: bad > 8 && bad*4 > utf8.RuneCountInString(raw)}
	text = unquote(strings.TrimRight(text, " "))
	for range 4 { // a few prefixes, in any order
		before := text
		text = r.prefix(text)
		if text == before {
			break
		}
	}
	first := byte(0) // most lines cannot match most of the patterns
	if text != "" {
		first = text[0]
	}
	leveled := strings.IndexByte("DIWEC", first) >= 0
	if m := findIf(leveled, native, text); m != nil {
		r.level, r.when, r.msg = m[1], m[2], m[7]
		r.setSource(m[3]+m[5], m[4]+m[6])
		r.at = clock("01-02 15:04:05", m[2])
		return r
	}
	if first == '{' && r.fromJSON(text) {
		return r
	}
	if m := findIf(leveled || first == 'F' || first == '[', glog, text); m != nil {
		r.level = map[string]string{"I": "INFO", "W": "WARNING", "E": "ERROR", "F": "CRITICAL"}[m[1]]
		r.when, r.msg = m[3], m[6]
		r.setSource(m[4], m[5])
		return r
	}
	if m := findIf(first == '[', loggerOf, text); m != nil {
		r.level, r.msg = m[2], m[5]
		r.setSource(m[3], m[4])
		return r
	}
	if m := findIf(leveled || first == '-', ray, text); m != nil {
		r.level, r.msg = m[1], m[4]
		r.setSource(m[2], m[3])
		return r
	}
	if m := findIf(leveled, uvicorn, text); m != nil {
		r.level, r.msg = m[1], m[2]
		return r
	}
	if m := findIf(r.level == "" && strings.ContainsAny(text, "#$%"), prompt, text); m != nil {
		r.command, r.msg = true, m[1]
		return r
	}
	if m := findIf(r.when != "", dashed, text); m != nil && m[4] != "" {
		r.level, r.msg = level(m[2]), m[4]
		r.setSource(or(m[1], m[3]), "")
		return r
	}
	r.msg = text
	return r
}

// findIf returns the match of a pattern where likely, a cheaper test, is true.
func findIf(likely bool, pattern *regexp.Regexp, text string) []string {
	if !likely {
		return nil
	}
	return pattern.FindStringSubmatch(text)
}

// unquote drops the marks of a line that was copied from a Markdown page.
func unquote(s string) string {
	if strings.HasPrefix(s, ">") {
		if q := quoted.FindString(s); len(q) < 16 {
			s = s[len(q):]
		}
	}
	if strings.HasPrefix(s, "^C") && len(s) > 2 { // a terminal's echo of Ctrl-C
		s = s[2:]
	}
	if len(s) > 2 && s[0] == '`' && s[len(s)-1] == '`' && !strings.HasPrefix(s, "```") {
		s = s[1 : len(s)-1]
	}
	return s
}

// prefix cuts one prefix off.
func (r *record) prefix(s string) string {
	if s == "" {
		return s
	}
	first := s[0]
	if m := findIf(first == '(', process, s); m != nil {
		r.process = m[1]
		return s[len(m[0]):]
	}
	if m := findIf(first == '[' && r.when != "", bracketed, s); m != nil { // of a program that passes vLLM's output on
		return s[len(m[0]):]
	}
	if m := findIf(first == '[', rank, s); m != nil {
		r.process = strings.Trim(m[0], "[]: ")
		return s[len(m[0]):]
	}
	if m := findIf(first == '[' || '0' <= first && first <= '9', isoTime, s); m != nil {
		r.when, r.at = m[1], clock("2006-01-02 15:04:05", strings.Replace(m[1], "T", " ", 1))
		return s[len(m[0]):]
	}
	if m := findIf(len(s) > 3 && s[3] == ' ', syslog, s); m != nil {
		r.when, r.at = m[1], clock("15:04:05", m[1])
		return s[len(m[0]):]
	}
	if m := findIf(strings.IndexByte(s, '|') > 0, container, s); m != nil && len(s) > len(m[0]) && s[len(m[0])] != '|' {
		r.process = strings.TrimRight(m[0], " |")
		return s[len(m[0]):]
	}
	return s
}

func (r *record) setSource(file, line string) {
	if file == "" {
		return
	}
	r.source = file
	if line != "" {
		r.source += ":" + line
	}
	r.module = file[strings.LastIndexByte(file, '/')+1:]
	if name, ok := strings.CutSuffix(r.module, ".py"); ok {
		r.module = name
	} else {
		r.module = r.module[strings.LastIndexByte(r.module, '.')+1:] // a logger's name
	}
}

// level returns vLLM's name of a level.
func level(name string) string {
	switch name {
	case "WARN":
		return "WARNING"
	case "FATAL":
		return "CRITICAL"
	}
	return name
}

// clock returns a moment as the time since the start of its year. Moments of one log can be
// subtracted; those of two years cannot.
func clock(layout, when string) time.Duration {
	t, err := time.Parse(layout, when)
	if err != nil {
		return 0
	}
	return t.Sub(time.Date(t.Year(), 1, 1, 0, 0, 0, 0, time.UTC)) + time.Second // never 0
}

// fromJSON takes a record of one flat object with a message, as log/slog and most loggers write it.
func (r *record) fromJSON(text string) bool {
	fields, ok := flat(text)
	if !ok {
		return false
	}
	msg, ok := fields["msg"]
	if !ok {
		if msg, ok = fields["message"]; !ok {
			return false
		}
	}
	r.msg, r.level, r.json = msg, level(strings.ToUpper(fields["level"])), fields
	if when := fields["time"]; len(when) >= 19 {
		r.when, r.at = when[:19], clock("2006-01-02T15:04:05", when[:19])
	}
	r.process = strings.TrimSpace(fields["role"] + " " + fields["node"])
	return true
}

// flat reads the members of a JSON object whose values are no objects. Nested ones are skipped.
func flat(s string) (map[string]string, bool) {
	fields := map[string]string{}
	s = strings.TrimSpace(s)
	if len(s) < 2 || s[0] != '{' || s[len(s)-1] != '}' {
		return nil, false
	}
	s = s[1 : len(s)-1]
	for range 256 {
		s = strings.TrimLeft(s, " ,")
		if s == "" {
			return fields, true
		}
		key, rest, ok := jsonString(s)
		if !ok {
			return nil, false
		}
		rest = strings.TrimLeft(rest, " ")
		if rest == "" || rest[0] != ':' {
			return nil, false
		}
		rest = strings.TrimLeft(rest[1:], " ")
		var value string
		switch {
		case rest == "":
			return nil, false
		case rest[0] == '"':
			if value, rest, ok = jsonString(rest); !ok {
				return nil, false
			}
		case rest[0] == '{' || rest[0] == '[':
			if value, rest, ok = nested(rest); !ok {
				return nil, false
			}
		default:
			end := strings.IndexByte(rest, ',')
			if end < 0 {
				end = len(rest)
			}
			value, rest = strings.TrimSpace(rest[:end]), rest[end:]
		}
		fields[key] = value
		s = rest
	}
	return nil, false
}

// jsonString cuts a quoted string off. The value stays printable: its escapes are kept but for
// quotes, backslashes and slashes.
func jsonString(s string) (value, rest string, ok bool) {
	if s == "" || s[0] != '"' {
		return "", "", false
	}
	for i := 1; i < len(s); i++ {
		switch s[i] {
		case '\\':
			i++
		case '"':
			return strings.NewReplacer(`\"`, `"`, `\\`, `\`, `\/`, `/`, `\u003c`, "<", `\u003e`, ">", `\u0026`, "&").Replace(s[1:i]), s[i+1:], true
		}
	}
	return "", "", false
}

// nested cuts an object or a list off.
func nested(s string) (value, rest string, ok bool) {
	depth, text := 0, false
	for i := 0; i < len(s); i++ {
		switch c := s[i]; {
		case text && c == '\\':
			i++
		case c == '"':
			text = !text
		case text:
		case c == '{' || c == '[':
			depth++
		case c == '}' || c == ']':
			if depth--; depth == 0 {
				return s[:i+1], s[i+1:], true
			}
		}
	}
	return "", "", false
}
