// Package policy is the rules of a node: which client has which limits, weight and priority. Operators write them in a file with
// sections, as systemd's unit files have them:
//
//	# Serving keeps 20 GiB, and is asked last.
//	[rule]
//	cgroup = /system.slice/serving.service
//	min = 20GiB
//	priority = 10
//
//	[rule]
//	user = students
//	max = 10GiB
//
// A rule applies to clients for which all of its conditions hold: user (name or number), cgroup (the path or one above it), label
// and name (patterns as the shell's), device (the UUID, or a part that it begins with). The rules apply in order: a later one
// replaces what an earlier one said of a key. A rule without conditions applies to all.
package policy

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"math"
	"os/user"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/cistern-gpu/cistern/internal/node/ledger"
	"github.com/cistern-gpu/cistern/internal/suggest"
	"github.com/cistern-gpu/cistern/internal/units"
)

// Client is what rules may ask of a client. Label is what the client says of itself; the kernel says the rest.
type Client struct {
	UID    uint32
	Cgroup string
	Label  string
	Name   string // of the program
	Device string // the UUID in hexadecimal, or as nvidia-smi writes it
}

// Rule is one rule.
type Rule struct {
	conditions []condition
	set        []func(*ledger.Policy)
	has        ledger.Policy // what the rule sets, for checks
	bounds     [3]bool       // of min, high and max, which it sets
	text       []string
}

// condition is one of a rule.
type condition func(c *Client) bool

// Policy is a list of rules. The zero value has none.
type Policy struct{ rules []Rule }

// Of is what the rules say of a client.
func (p *Policy) Of(c Client) (out ledger.Policy) {
	out.Weight = 1
	for i := range p.rules {
		p.rules[i].apply(&c, &out)
	}
	return out
}

func (r *Rule) apply(c *Client, to *ledger.Policy) {
	for _, holds := range r.conditions {
		if !holds(c) {
			return
		}
	}
	for _, set := range r.set {
		set(to)
	}
}

// With is the policy with more rules, after all others.
func (p *Policy) With(more []Rule) *Policy {
	return &Policy{rules: slices.Concat(p.rules, more)}
}

// Replaces reports whether the rule has the conditions of another one and sets the same keys. Then the other one says nothing where this
// one comes after it.
func (r *Rule) Replaces(o *Rule) bool {
	return slices.Equal(r.shape(), o.shape())
}

// shape is the rule's conditions, and the keys that it sets.
func (r *Rule) shape() (items []string) {
	for _, item := range r.text {
		if key, _, _ := strings.Cut(item, "="); slices.Index(keys, key) >= conditionKeys {
			item = key
		}
		items = append(items, item)
	}
	slices.Sort(items)
	return slices.Compact(items)
}

// Len is the number of rules.
func (p *Policy) Len() int { return len(p.rules) }

// String is the rule in one line.
func (r *Rule) String() string { return strings.Join(r.text, " ") }

// most bounds what is read of a file.
const (
	mostRules = 10_000
	mostLine  = 64 << 10
)

// Parse reads a policy. Errors name the line and the key.
func Parse(in io.Reader) (*Policy, error) {
	p := &Policy{}
	s := bufio.NewScanner(in)
	s.Buffer(nil, mostLine)
	line, began := 0, 0
	end := func() error {
		if n := len(p.rules); n > 0 {
			if err := p.rules[n-1].check(); err != nil {
				return fmt.Errorf("line %d: the rule that begins here: %w", began, err)
			}
		}
		return nil
	}
	for s.Scan() {
		line++
		text := strings.TrimSpace(s.Text())
		switch {
		case text == "" || text[0] == '#' || text[0] == ';':
		case text == "[rule]":
			if err := end(); err != nil {
				return nil, err
			}
			if began = line; len(p.rules) == mostRules {
				return nil, fmt.Errorf("line %d: expected at most %d rules", line, mostRules)
			}
			p.rules = append(p.rules, Rule{})
		case text[0] == '[':
			return nil, fmt.Errorf("line %d: section %q: expected [rule]", line, text)
		case len(p.rules) == 0:
			return nil, fmt.Errorf("line %d: %q: expected [rule] before the first key", line, text)
		default:
			if err := p.rules[len(p.rules)-1].item(text); err != nil {
				return nil, fmt.Errorf("line %d: %w", line, err)
			}
		}
	}
	if err := s.Err(); err != nil {
		return nil, fmt.Errorf("line %d: %w", line+1, err)
	}
	if err := end(); err != nil {
		return nil, err
	}
	return p, nil
}

// ParseRule reads a rule in one line: items key=value with spaces in between.
func ParseRule(text string) (r Rule, err error) {
	items := strings.Fields(text)
	if len(items) == 0 {
		return r, errors.New("expected key=value")
	}
	for _, item := range items {
		if err := r.item(item); err != nil {
			return r, err
		}
	}
	return r, r.check()
}

// check is what is wrong with the rule as a whole.
func (r *Rule) check() error {
	if len(r.set) == 0 {
		return errors.New("it sets nothing: expected one of min, high, max, weight, priority, decay")
	}
	names, values := [...]string{"min", "high", "max"}, [...]uint64{r.has.Min, r.has.High, r.has.Max}
	for i := range names {
		for k := i + 1; k < len(names); k++ {
			if r.bounds[i] && r.bounds[k] && values[k] != 0 && values[i] > values[k] {
				return fmt.Errorf("%s is %s, above %s, which is %s", names[i], units.FormatBytes(values[i]), names[k], units.FormatBytes(values[k]))
			}
		}
	}
	return nil
}

// The keys: conditions first.
var keys = []string{"user", "cgroup", "label", "name", "device", "min", "high", "max", "weight", "priority", "decay"}

const conditionKeys = 5

// item reads "key = value".
func (r *Rule) item(text string) error {
	key, value, ok := strings.Cut(text, "=")
	key, value = strings.TrimSpace(key), strings.TrimSpace(value)
	if !ok {
		return fmt.Errorf("%q: expected key = value", text)
	}
	if value == "" {
		return fmt.Errorf("%s: expected a value", key)
	}
	var err error
	switch key {
	case "user":
		err = r.user(value)
	case "cgroup":
		if !path.IsAbs(value) {
			return fmt.Errorf("cgroup = %s: expected a path that begins with /", value)
		}
		want := path.Clean(value)
		r.when(func(c *Client) bool { return want == "/" || c.Cgroup == want || strings.HasPrefix(c.Cgroup, want+"/") })
	case "label":
		err = r.pattern(value, func(c *Client) string { return c.Label })
	case "name":
		err = r.pattern(value, func(c *Client) string { return c.Name })
	case "device":
		want := plainUUID(value)
		r.when(func(c *Client) bool { return strings.HasPrefix(plainUUID(c.Device), want) })
	case "min", "high", "max":
		err = r.bytes(key, value)
	case "weight":
		n, bad := strconv.ParseUint(value, 10, 32)
		if bad != nil || n < 1 || n > 1_000_000 {
			return fmt.Errorf("weight = %s: expected a number from 1 to 1000000", value)
		}
		r.set = append(r.set, func(p *ledger.Policy) { p.Weight = uint32(n) })
	case "priority":
		n, bad := strconv.ParseInt(value, 10, 32)
		if bad != nil {
			return fmt.Errorf("priority = %s: expected a number from %d to %d", value, math.MinInt32, math.MaxInt32)
		}
		r.set = append(r.set, func(p *ledger.Policy) { p.Priority = int32(n) })
	case "decay":
		d, bad := time.ParseDuration(value)
		if bad != nil || d != 0 && d < leastDecay || d > mostDecay {
			return fmt.Errorf("decay = %s: expected a time from %v to %v, or 0s", value, leastDecay, mostDecay)
		}
		r.set = append(r.set, func(p *ledger.Policy) { p.Decay = d })
	default:
		if hint := suggest.Question(key, "", keys); hint != "" {
			return fmt.Errorf("unknown key %q: %s", key, hint)
		}
		return fmt.Errorf("unknown key %q: the keys are %s", key, strings.Join(keys, ", "))
	}
	if err == nil {
		r.text = append(r.text, key+"="+value)
	}
	return err
}

// Times below leastDecay are shorter than the pauses of a busy process.
const (
	leastDecay = 5 * time.Second
	mostDecay  = 24 * time.Hour
)

func (r *Rule) when(c condition) { r.conditions = append(r.conditions, c) }

func (r *Rule) user(value string) error {
	id, err := strconv.ParseUint(value, 10, 32)
	if err != nil {
		u, err := user.Lookup(value)
		if err != nil {
			return fmt.Errorf("user = %s: there is no such user", value)
		}
		if id, err = strconv.ParseUint(u.Uid, 10, 32); err != nil {
			return fmt.Errorf("user = %s: its number is %q", value, u.Uid)
		}
	}
	r.when(func(c *Client) bool { return c.UID == uint32(id) })
	return nil
}

func (r *Rule) pattern(value string, of func(*Client) string) error {
	if err := CheckPattern(value); err != nil {
		return err
	}
	r.when(func(c *Client) bool { return Match(value, of(c)) })
	return nil
}

// CheckPattern is what is wrong with a pattern.
func CheckPattern(pattern string) error {
	if _, err := path.Match(pattern, ""); err != nil {
		return fmt.Errorf("%q: expected a pattern as the shell's", pattern)
	}
	return nil
}

// Match reports whether a label or a name is of a pattern, in which a slash is a character as any other.
func Match(pattern, name string) bool {
	ok, _ := path.Match(strings.ReplaceAll(pattern, "/", "\x00"), strings.ReplaceAll(name, "/", "\x00"))
	return ok
}

func (r *Rule) bytes(key, value string) error {
	n, err := units.ParseBytes(value)
	if err != nil {
		return fmt.Errorf("%s = %s: %w", key, value, err)
	}
	at := func(p *ledger.Policy) *uint64 {
		switch key {
		case "min":
			return &p.Min
		case "high":
			return &p.High
		}
		return &p.Max
	}
	*at(&r.has) = n
	r.bounds[map[string]int{"min": 0, "high": 1, "max": 2}[key]] = true
	r.set = append(r.set, func(p *ledger.Policy) { *at(p) = n })
	return nil
}

// plainUUID is a UUID without dashes and NVIDIA's prefix.
func plainUUID(s string) string {
	return strings.ReplaceAll(strings.TrimPrefix(strings.ToLower(s), "gpu-"), "-", "")
}
