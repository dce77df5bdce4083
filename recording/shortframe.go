package recording

import (
	"path"
	"regexp"
	"strings"
)

// Short names of frames, for where there is little room.

// cleanPath is a path with slashes, without detours.
func cleanPath(file string) string {
	file = strings.ReplaceAll(file, `\`, "/")
	if strings.Contains(file, "..") {
		file = path.Clean(file)
	}
	return file
}

// inPackages is a path from the folder on into which Python's packages are installed.
func inPackages(file string) (inside string, ok bool) {
	for _, folder := range []string{"/site-packages/", "/dist-packages/"} {
		if i := strings.LastIndex(file, folder); i >= 0 {
			return file[i+len(folder):], true
		}
	}
	return "", false
}

// ShortFrame is a frame as String writes it, short: of the names of C++ and Rust without parameters and long arguments of
// templates, without the folders that packages lie in, and without all but the last folders of others; of a library its
// name alone.
func ShortFrame(text string) string {
	name, file := cutFrame(text)
	name = shortName(name)
	if file == "" {
		return name
	}
	file = cleanPath(file)
	if base := path.Base(file); sharedObject.MatchString(base) {
		if strings.HasPrefix(name, base+"+0x") {
			return name
		}
		return name + " " + base
	}
	if inside, ok := inPackages(file); ok {
		return name + " " + inside
	}
	if i := pythonsOwn.FindStringIndex(file); i != nil {
		return name + " " + file[i[1]:]
	}
	if parts := strings.Split(file, "/"); len(parts) > mostParts {
		file = ".../" + strings.Join(parts[len(parts)-2:], "/")
	}
	if len(file) > longFile {
		file = "..." + strings.ToValidUTF8(file[len(file)-longFile:], "")
	}
	return name + " " + file
}

// LayerOf is the layer of a frame as String writes it.
func LayerOf(text string) Layer {
	name, file := cutFrame(text)
	if at := atLine.FindStringIndex(file); at != nil {
		return Frame{Func: name, File: file[:at[0]], Line: 1}.Layer()
	}
	return Frame{Func: name, File: file}.Layer()
}

// mostParts is of how many parts a path may be to be shown whole, as /srv/job/train.py is.
const mostParts = 4

// longFile is how many bytes of the name of a file are shown at most; the end of it.
const longFile = 96

// atLine is the end of what String writes: a file with its line.
var atLine = regexp.MustCompile(`:[0-9]+$`)

// cutFrame takes apart what String put together. A function of C++ may have spaces in its name.
func cutFrame(text string) (name, file string) {
	if i := strings.Index(text, " /"); i >= 0 {
		return text[:i], text[i+1:]
	}
	i := strings.IndexByte(text, ' ')
	if i < 0 || strings.ContainsAny(text[:i], "(") {
		return text, ""
	}
	if file := text[i+1:]; atLine.MatchString(file) || sharedObject.MatchString(file) || !strings.ContainsAny(file, " (<:") {
		return text[:i], file
	}
	return text, ""
}

const (
	longArguments = 20 // bytes of a template's arguments that are left out
	noParameters  = "(anonymous namespace)"
)

// operators of C++ that have brackets in their names, longest first.
var operators = []string{"()", "<<=", ">>=", "<=>", "->*", "<<", ">>", "<=", ">=", "->", "<", ">"}

// shortName is the name of a function of C++ or Rust without parameters, what it returns and long arguments of templates. Where
// brackets do not match it is what it was.
func shortName(name string) string {
	if !strings.ContainsAny(name, "(<") {
		return name
	}
	var b strings.Builder
	var open []int // where in b brackets begin
	var kinds []byte
	last := 0 // in b, behind the last space that is in no bracket
	i := 0
	for i < len(name) {
		rest := name[i:]
		c := name[i]
		switch {
		case strings.HasPrefix(rest, noParameters):
			b.WriteString(noParameters)
			i += len(noParameters)
			continue
		case strings.HasPrefix(rest, "operator") && (i == 0 || !isWord(name[i-1])):
			op := operatorIn(rest)
			b.WriteString(op)
			i += len(op)
			continue
		case c == '-' && strings.HasPrefix(rest, "->"):
			b.WriteString("->")
			i += 2
			continue
		case c == '(' || c == '<' || c == '{' || c == '[':
			open, kinds = append(open, b.Len()), append(kinds, c)
		case c == ')' || c == '>' || c == '}' || c == ']':
			n := len(open) - 1
			if n < 0 || closing[kinds[n]] != c {
				return name
			}
			from := open[n]
			open, kinds = open[:n], kinds[:n]
			text := b.String()
			inside := text[from+1:]
			switch {
			case c == ')':
				b.Reset()
				b.WriteString(text[:from])
				i++
				continue
			case c == '>' && from > 0 && len(inside) > longArguments:
				b.Reset()
				b.WriteString(text[:from] + "<...")
			}
		case c == ' ' && len(open) == 0:
			if rest := name[i+1:]; strings.HasPrefix(rest, "const") || strings.HasPrefix(rest, "[clone") || strings.HasPrefix(rest, "&") ||
				strings.HasPrefix(rest, "volatile") || strings.HasPrefix(rest, "requires ") {
				return b.String()[last:]
			}
			last = b.Len() + 1
		}
		b.WriteByte(c)
		i++
	}
	if len(open) > 0 || last >= b.Len() {
		return name
	}
	return b.String()[last:]
}

// operatorIn is the operator that a name begins with, as far as brackets and spaces in it could be taken for others.
func operatorIn(name string) string {
	end := len("operator")
	for _, op := range operators {
		if strings.HasPrefix(name[end:], op) {
			end += len(op)
			break
		}
	}
	if strings.HasPrefix(name[end:], " ") { // a conversion, new, delete
		end++
	}
	return name[:end]
}

var closing = map[byte]byte{'(': ')', '<': '>', '{': '}', '[': ']'}

func isWord(c byte) bool {
	return c == '_' || c >= '0' && c <= '9' || c >= 'A' && c <= 'Z' || c >= 'a' && c <= 'z'
}
