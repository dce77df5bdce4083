package open

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/cistern-gpu/cistern/internal/units"
)

// stage is one part of the words, between bars.
type stage struct {
	kind    *kind
	options options
}

// maxStages is more than any stack has.
const maxStages = 32

// stagesOf is read, with the words in its errors.
func stagesOf(words string) ([]stage, error) {
	stages, err := read(words)
	if err != nil {
		return nil, fmt.Errorf("upstream %s: %w", quote(words), err)
	}
	return stages, nil
}

// read splits words into stages and checks names and keys, not values.
func read(words string) ([]stage, error) {
	parts := strings.Split(words, "|")
	if len(parts) > maxStages {
		return nil, fmt.Errorf("%d stages, at most %d", len(parts), maxStages)
	}
	var out []stage
	for i, part := range parts {
		name, rest, more := strings.Cut(part, ":")
		at := slices.IndexFunc(kinds, func(k kind) bool { return k.name == name })
		last := i == len(parts)-1
		switch {
		case at < 0 && last:
			return nil, fmt.Errorf("%s is not an upstream: choose %s", quote(name), names(true))
		case at < 0:
			return nil, fmt.Errorf("%s is not an adaptor: choose %s", quote(name), names(false))
		case last && kinds[at].upstream == nil:
			return nil, fmt.Errorf("%s is an adaptor and needs an upstream after a bar: choose %s", name, names(true))
		case !last && kinds[at].upstream != nil:
			return nil, fmt.Errorf("%s is an upstream and must be last; before it, choose %s", name, names(false))
		}
		s := stage{kind: &kinds[at], options: options{values: map[string]string{}}}
		if more {
			for _, pair := range strings.Split(rest, ",") {
				key, value, ok := strings.Cut(pair, "=")
				_, twice := s.options.values[key]
				switch {
				case len(s.kind.keys) == 0:
					return nil, fmt.Errorf("%s has no options", name)
				case !slices.Contains(s.kind.keys, key):
					return nil, fmt.Errorf("%s has no option %s: choose %s", name, quote(key), list(s.kind.keys, "and"))
				case !ok || value == "":
					return nil, fmt.Errorf("%s:%s has no value", name, key)
				case twice:
					return nil, fmt.Errorf("%s:%s is given twice", name, key)
				}
				s.options.values[key] = value
			}
		}
		for _, key := range s.kind.keys[:s.kind.must] {
			if !s.options.has(key) {
				return nil, fmt.Errorf("%s needs %s:%s=…", name, name, key)
			}
		}
		out = append(out, s)
	}
	return out, nil
}

// names are those of the upstreams, or of the adaptors.
func names(upstreams bool) string {
	var out []string
	for _, k := range kinds {
		if (k.upstream != nil) == upstreams {
			out = append(out, k.name)
		}
	}
	return list(out, "or")
}

func list(words []string, last string) string {
	if len(words) == 1 {
		return words[0]
	}
	n := len(words) - 1
	return strings.Join(words[:n], ", ") + " " + last + " " + words[n]
}

// quote is a word of the user's in one line, cut where it is long.
func quote(s string) string {
	const most = 80
	if len(s) > most {
		s = strings.ToValidUTF8(s[:most], "") + "…"
	}
	return strconv.Quote(s)
}

// options are the values of a stage. The first that cannot be read is kept in err.
type options struct {
	values map[string]string
	err    error
}

func (o *options) fail(format string, args ...any) {
	if o.err == nil {
		o.err = fmt.Errorf(format, args...)
	}
}

func (o *options) has(key string) bool {
	_, ok := o.values[key]
	return ok
}

func (o *options) text(key string) string { return o.values[key] }

// size is a number of bytes, 0 where it was not said.
func (o *options) size(key string) uint64 {
	if !o.has(key) {
		return 0
	}
	n, err := units.ParseBytes(o.values[key])
	if err != nil {
		o.fail("%s: %w", key, err)
	}
	return n
}

func (o *options) number(key string, otherwise int) int {
	if !o.has(key) {
		return otherwise
	}
	n, err := strconv.ParseUint(o.values[key], 10, 31)
	if err != nil {
		o.fail("%s=%s is not a number", key, quote(o.values[key]))
	}
	return int(n)
}

func (o *options) boolean(key string) bool { return o.choice(key, "false", "true") == "true" }

// choice is one of the words, the first where none was said.
func (o *options) choice(key string, words ...string) string {
	if !o.has(key) {
		return words[0]
	}
	v := o.values[key]
	if !slices.Contains(words, v) {
		o.fail("%s=%s: choose %s", key, quote(v), list(words, "or"))
	}
	return v
}
