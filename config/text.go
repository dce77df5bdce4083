package config

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/cistern-gpu/cistern/internal/suggest"
	"github.com/cistern-gpu/cistern/internal/units"
	"github.com/cistern-gpu/cistern/memory"
)

// setting is one key of the text form.
type setting struct {
	key string
	set func(o *Options, value string) error
	// text is the value, "" where it is the default's. Both have their defaults filled in.
	text func(o, defaults *Options) string
}

// settings are all keys, in the order in which String writes them.
var settings = []setting{
	word("driver", "", func(o *Options) *string { return &o.Driver }, true),
	word("backend", "", func(o *Options) *Backend { return &o.Backend }, true),
	size("limit", "", func(o *Options) *uint64 { return &o.Limit }),
	size("chunk", "must be a multiple of 2 MiB", func(o *Options) *uint64 { return &o.ChunkMax }),
	word("cross_stream", "", func(o *Options) *CrossStream { return &o.CrossStream }, true),
	{"stages", func(o *Options, value string) (err error) {
		o.Stages, err = memory.ParseStages(value)
		return err
	}, func(o, defaults *Options) string {
		if o.Stages|memory.StageFit == defaults.Stages|memory.StageFit {
			return ""
		}
		return o.Stages.String()
	}},
	size("cache_limit", "", func(o *Options) *uint64 { return &o.CacheLimit }),
	{"cache_decay", func(o *Options, value string) (err error) {
		if o.CacheDecay, err = time.ParseDuration(value); err != nil || o.CacheDecay < 0 {
			return errors.New("expected a time of 0 or more with its unit, such as 500ms or 10s")
		}
		if o.CacheDecay == 0 {
			o.CacheDecay = -1
		}
		return nil
	}, func(o, defaults *Options) string {
		switch {
		case o.CacheDecay == defaults.CacheDecay:
			return ""
		case o.CacheDecay < 0:
			return "0s"
		}
		return o.CacheDecay.String()
	}},
	{"history", func(o *Options, value string) (err error) {
		o.History, err = strconv.Atoi(value)
		return err
	}, func(o, _ *Options) string {
		if o.History == o.impliedHistory() {
			return ""
		}
		return strconv.Itoa(o.History)
	}},
	word("ipc", "", func(o *Options) *IPC { return &o.IPC }, true),
	flag("single_handle", func(o *Options) *bool { return &o.SingleHandle }),
	flag("capture_reuse", func(o *Options) *bool { return &o.CaptureReuse }),
	word("magazine", "choose on or off", func(o *Options) *Switch { return &o.Magazine }, false),
	word("spill", "choose managed, pinned or host_numa", func(o *Options) *Spill { return &o.Spill }, false),
	{"upstream", func(o *Options, value string) error {
		if o.Upstream = strings.ReplaceAll(value, ";", ","); value == "" {
			return errors.New("expected the name of an upstream, such as managed")
		}
		return nil
	}, func(o, _ *Options) string { return strings.ReplaceAll(o.Upstream, ",", ";") }},
	word("stacks", "choose off, python, native or all", func(o *Options) *string { return &o.Stacks }, false),
	size("stack_sample", "", func(o *Options) *uint64 { return &o.StackSample }),
	word("report", "expected a folder", func(o *Options) *string { return &o.Report }, false),
	flag("report_child", func(o *Options) *bool { return &o.ReportChild }),
	word("node", "choose auto, off or the path of the broker's socket", func(o *Options) *string { return &o.Node }, false),
	{"node_wait", func(o *Options, value string) (err error) {
		if o.NodeWait, err = time.ParseDuration(value); err == nil && o.NodeWait == 0 {
			o.NodeWait = -1 // the zero value is the default
		}
		return err
	}, func(o, defaults *Options) string {
		if o.NodeWait == defaults.NodeWait {
			return ""
		}
		return max(o.NodeWait, 0).String()
	}},
	{"node_headroom", func(o *Options, value string) (err error) {
		if o.NodeHeadroom, err = units.ParseBytes(value); err == nil && o.NodeHeadroom == 0 {
			o.NodeHeadroom = NoHeadroom // the zero value is the default
		}
		return err
	}, func(o, _ *Options) string {
		if o.NodeHeadroom == 0 {
			return ""
		}
		return strconv.FormatUint(o.Headroom(0), 10)
	}},
	word("node_label", "", func(o *Options) *string { return &o.NodeLabel }, true),
	word("top", "choose on or off", func(o *Options) *Switch { return &o.Top }, false),
}

// word is a setting that is text. Validate knows which words there are; without one there is an error, unless it may be empty.
func word[T ~string](key, missing string, at func(*Options) *T, empty bool) setting {
	return setting{key, func(o *Options, value string) error {
		if *at(o) = T(value); value == "" && !empty {
			return errors.New(missing)
		}
		return nil
	}, func(o, defaults *Options) string {
		if *at(o) == *at(defaults) {
			return ""
		}
		return string(*at(o))
	}}
}

// size is a setting in bytes. zero is what is wrong with none; "" where it is allowed.
func size(key, zero string, at func(*Options) *uint64) setting {
	return setting{key, func(o *Options, value string) (err error) {
		if *at(o), err = units.ParseBytes(value); err == nil && *at(o) == 0 && zero != "" {
			err = errors.New(zero)
		}
		return err
	}, func(o, defaults *Options) string {
		if *at(o) == *at(defaults) {
			return ""
		}
		return strconv.FormatUint(*at(o), 10)
	}}
}

// flag is a setting that is true or false, false by default.
func flag(key string, at func(*Options) *bool) setting {
	return setting{key, func(o *Options, value string) error {
		if *at(o) = value == "true"; value != "true" && value != "false" {
			return errors.New("choose true or false")
		}
		return nil
	}, func(o, _ *Options) string {
		if *at(o) {
			return "true"
		}
		return ""
	}}
}

func keys() string {
	var list []string
	for _, s := range settings {
		list = append(list, s.key)
	}
	return strings.Join(list, ", ")
}

// impliedHistory is the history of settings that do not name one.
func (o *Options) impliedHistory() int {
	if o.Report != "" {
		return ReportHistory
	}
	return 0
}

// Parse reads the text form that CISTERN_CONF has: "key:value,key:value". An empty text is the defaults.
//
//	driver:sim:80GiB        which driver (package cuda/open)
//	backend:vmm|malloc
//	limit:70GiB             physical memory per device; 0 is no limit
//	chunk:32MiB             largest chunk
//	cross_stream:wait|ready
//	stages:collect+remap+grow+lend+callback+node+spill    stages to try ("all")
//	cache_limit:2GiB        free memory that a device keeps; 0 is no limit
//	cache_decay:10s         how long memory above it must not have been needed before it is released
//	history:100000          events kept; with report 1000000 where it is not given
//	ipc:handles|legacy      legacy: memory that cudaIpcGetMemHandle accepts (backend:malloc)
//	single_handle:true      each segment is one physical handle
//	capture_reuse:true      a capture reuses memory of several streams that it has joined
//	magazine:on|off         off: the C library calls the engine for every request and every free
//	spill:managed|pinned|host_numa    where the default pool gets memory from when nothing else is left
//	upstream:NAME           where the memory of pools comes from that name no other (package resource/open); a semicolon
//	                        in NAME is the comma between options
//	stacks:off|python|native|all    the frames of the stacks that requests and blocks keep
//	stack_sample:1MiB       of smaller requests only some, in proportion to their size; 0 is all
//	report:FOLDER           the C library writes a file there for each out-of-memory
//	report_child:true       and starts cistern report on those that stay
//	node:auto|off|PATH      the node's broker: where one listens, never, or that of a socket
//	node_wait:3s            how long a request waits for memory that other processes may stop using
//	node_headroom:128MiB    what the driver keeps free for libraries, of memory that other processes do not use
//	node_label:NAME         what the process calls itself, for the broker's policy
//	top:on|off              off: the C library keeps no status segment for cistern top
func Parse(text string) (Options, error) {
	var o Options
	if strings.TrimSpace(text) == "" {
		return o.WithDefaults(), nil
	}
	history := false // it is given
	for _, item := range strings.Split(text, ",") {
		key, value, ok := strings.Cut(strings.TrimSpace(item), ":")
		if !ok {
			return o, fmt.Errorf("setting %q: expected key:value; the keys are %s", item, keys())
		}
		i := slices.IndexFunc(settings, func(s setting) bool { return s.key == key })
		if i < 0 {
			if hint := suggest.Question(key, "", strings.Split(keys(), ", ")); hint != "" {
				return o, fmt.Errorf("unknown setting %q: %s", key, hint)
			}
			return o, fmt.Errorf("unknown setting %q: the keys are %s", key, keys())
		}
		if err := settings[i].set(&o, value); err != nil {
			return o, fmt.Errorf("setting %s:%s: %w", key, value, err)
		}
		history = history || key == "history"
	}
	if !history {
		o.History = o.impliedHistory()
	}
	o = o.WithDefaults()
	return o, o.Validate()
}

// String is the text form of the options that differ from the defaults.
func (o Options) String() string {
	o = o.WithDefaults()
	defaults := Options{}.WithDefaults()
	var items []string
	for _, s := range settings {
		if text := s.text(&o, &defaults); text != "" {
			items = append(items, s.key+":"+text)
		}
	}
	return strings.Join(items, ",")
}
