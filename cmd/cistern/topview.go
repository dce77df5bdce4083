package main

import (
	"context"
	"slices"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	tea "charm.land/bubbletea/v2"

	"github.com/cistern-gpu/cistern/internal/top"
)

// The live view of `cistern top`: what happens on a key, a look or a change of size. What it looks like is in topdraw.go
// and topdetails.go.

// topView is Bubbletea's model. One goroutine has it; a look is taken in another, which has the source.
type topView struct {
	ctx      context.Context
	source   top.Source
	interval time.Duration
	now      func() time.Time
	ascii    bool

	width, height int

	state   top.State
	table   top.Table
	choice  top.Choice
	series  top.Series
	looking time.Time // since when a look is under way, zero if none is
	ticks   int       // that were ordered; only the last one counts
	paused  bool

	mode     topMode
	typing   bool // into the filter
	before   string
	selected rowID
	scroll   // where the selected process stands

	shown   details
	pending bool // details of another process are wanted before the next tick
}

type topMode int

const (
	modeList topMode = iota
	modeDetails
	modeHelp
)

// scroll is a list of which a part is seen.
type scroll struct {
	cursor int // the line that is chosen
	first  int // the topmost line that is seen
}

// key moves to another of n lines, of which rows are seen, if that is what the key means.
func (s *scroll) key(k string, rows, n int) bool {
	page := max(1, rows-1)
	switch k {
	case "up", "k":
		s.cursor--
	case "down", "j":
		s.cursor++
	case "pgup":
		s.cursor -= page
	case "pgdown":
		s.cursor += page
	case "home":
		s.cursor = 0
	case "end":
		s.cursor = n
	default:
		return false
	}
	s.clamp(rows, n)
	return true
}

// clamp keeps the cursor on a line, the line among those that are seen, and no room empty.
func (s *scroll) clamp(rows, n int) {
	rows = max(1, rows)
	s.cursor = min(max(0, s.cursor), max(0, n-1))
	s.first = max(min(s.first, s.cursor), s.cursor-rows+1)
	s.first = max(0, min(s.first, n-rows))
}

// rowID is the process that is chosen, wherever it stands.
type rowID struct {
	pid   int
	start uint64
}

func idOf(r *top.Row) rowID { return rowID{r.PID, r.Start} }

// details are what is shown of one process.
type details struct {
	row     top.Row // as it was last seen
	since   time.Time
	ended   bool
	held    *top.Details // the last that it told
	section int
	scroll
	open bool // the chosen stack with all of its frames
}

// The messages of the view.
type (
	lookMsg top.Look // was taken
	tickMsg int      // the next one is due, if no other was ordered since
	beatMsg struct{} // a second has passed: the clock
)

func newTopView(source top.Source, f *topFlags, ascii bool) *topView {
	return &topView{ctx: context.Background(), source: source, interval: f.interval, now: time.Now, choice: f.choice, ascii: ascii,
		width: 80, height: 24}
}

// Init begins to look.
func (v *topView) Init() tea.Cmd { return tea.Batch(v.look(), beat()) }

func beat() tea.Cmd { return tea.Tick(time.Second, func(time.Time) tea.Msg { return beatMsg{} }) }

// look takes a look, unless one is under way.
func (v *topView) look() tea.Cmd {
	if !v.looking.IsZero() {
		return nil
	}
	v.looking, v.pending = v.now(), false
	ctx, source, wanted := v.ctx, v.source, top.Wanted{}
	if v.mode == modeDetails && !v.shown.ended {
		wanted.PID = v.shown.row.PID
	}
	return func() tea.Msg { return lookMsg(source.Look(ctx, wanted)) }
}

// Update takes a message.
func (v *topView) Update(msg tea.Msg) (tea.Model, tea.Cmd) {
	switch msg := msg.(type) {
	case tea.WindowSizeMsg:
		v.width, v.height = msg.Width, msg.Height
		v.clamp()
	case lookMsg:
		took := v.now().Sub(v.looking)
		v.looking = time.Time{}
		v.state.Add(top.Look(msg))
		v.refresh()
		if v.pending {
			return v, v.look()
		}
		v.ticks++
		n := tickMsg(v.ticks)
		return v, tea.Tick(max(v.interval-took, topOften/2), func(time.Time) tea.Msg { return n })
	case tickMsg:
		if v.paused || int(msg) != v.ticks {
			return v, nil // until it is not, or details are asked for
		}
		return v, v.look()
	case beatMsg:
		return v, beat()
	case tea.KeyPressMsg:
		return v, v.key(msg)
	case tea.PasteMsg:
		if v.typing {
			v.typeText(msg.Content)
		}
	}
	return v, nil
}

// key does what a key means where it is pressed.
func (v *topView) key(k tea.KeyPressMsg) tea.Cmd {
	switch k.String() {
	case "ctrl+c":
		return tea.Quit
	case "ctrl+z":
		return tea.Suspend
	}
	switch {
	case v.typing:
		v.keyFilter(k)
		return nil
	case k.String() == "q":
		return tea.Quit
	case v.mode == modeHelp:
		v.mode = modeList
		return nil
	}
	switch k.String() {
	case "space", "p":
		v.paused = !v.paused
		if !v.paused {
			return v.look()
		}
		return nil
	case "t":
		v.series = 1 - v.series
		return nil
	}
	if v.mode == modeDetails {
		return v.keyDetails(k.String())
	}
	return v.keyList(k.String())
}

// sortKeys choose an order at once.
var sortKeys = map[string]top.Key{"R": "reserved", "A": "allocated", "C": "cached", "P": "peak", "U": "used", "D": "rate",
	"O": "ooms", "I": "pid", "N": "name"}

func (v *topView) keyList(k string) tea.Cmd {
	if v.scroll.key(k, v.listRows(), len(v.table.Rows)) {
		if len(v.table.Rows) > 0 {
			v.selected = idOf(&v.table.Rows[v.cursor])
		}
		return nil
	}
	switch k {
	case "s":
		v.sortBy(step(top.Keys, v.choice.Sort, 1))
	case "S":
		v.sortBy(step(top.Keys, v.choice.Sort, -1))
	case "r":
		v.choice.Reversed = !v.choice.Reversed
		v.refresh()
	case "/":
		v.typing, v.before = true, v.choice.Text
		v.clamp()
	case "esc":
		v.choice.Text, v.choice.GPU = "", -1
		v.refresh()
	case "g":
		v.choice.GPU = step(append([]int{-1}, v.table.Indices()...), v.choice.GPU, 1)
		v.refresh()
	case "?", "h", "f1":
		v.mode = modeHelp
	case "enter", "right", "l":
		if len(v.table.Rows) > 0 {
			return v.openDetails(v.table.Rows[v.cursor])
		}
	default:
		if key, ok := sortKeys[k]; ok {
			v.sortBy(key)
		} else if len(k) == 1 && k[0] >= '0' && k[0] <= '9' {
			v.chooseGPU(int(k[0] - '0'))
		}
	}
	return nil
}

// step is the value after (or before) the one that is chosen, round and round.
func step[T comparable](all []T, now T, by int) T {
	for i, x := range all {
		if x == now {
			return all[(i+by+len(all))%len(all)]
		}
	}
	return all[0]
}

func (v *topView) sortBy(k top.Key) {
	v.choice.Sort, v.choice.Reversed = k, false
	v.refresh()
}

// chooseGPU shows one GPU's processes only; the same number again, all.
func (v *topView) chooseGPU(n int) {
	switch {
	case v.choice.GPU == n:
		v.choice.GPU = -1
	case slices.Contains(v.table.Indices(), n):
		v.choice.GPU = n
	}
	v.refresh()
}

func (v *topView) keyFilter(k tea.KeyPressMsg) {
	switch k.String() {
	case "enter":
		v.typing = false
	case "esc":
		v.typing, v.choice.Text = false, v.before
	case "backspace":
		_, n := utf8.DecodeLastRuneInString(v.choice.Text)
		v.choice.Text = v.choice.Text[:len(v.choice.Text)-n]
	case "ctrl+u":
		v.choice.Text = ""
	default:
		v.typeText(k.Text)
	}
	v.refresh()
}

// longestFilter is longer than any that is typed.
const longestFilter = 200

func (v *topView) typeText(s string) {
	s = strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return -1
		}
		return r
	}, s)
	if len(v.choice.Text)+len(s) <= longestFilter {
		v.choice.Text += s
	}
	v.refresh()
}

// refresh makes the table anew, with the same process chosen as long as it is there.
func (v *topView) refresh() {
	v.table = v.state.Table(v.choice)
	for i := range v.table.Rows {
		if idOf(&v.table.Rows[i]) == v.selected {
			v.cursor = i
		}
	}
	v.clamp()
	if v.mode == modeDetails {
		v.refreshDetails()
	}
}

// clamp keeps the cursor on a process and the process on the screen.
func (v *topView) clamp() {
	v.scroll.clamp(v.listRows(), len(v.table.Rows))
	if len(v.table.Rows) > 0 && v.selected != (rowID{}) {
		v.selected = idOf(&v.table.Rows[v.cursor])
	}
}

// openDetails shows one process. Only from now on is it asked for more than its page's numbers.
func (v *topView) openDetails(r top.Row) tea.Cmd {
	v.mode, v.selected = modeDetails, idOf(&r)
	v.shown = details{row: r, section: (&details{row: r}).sections()[0], since: v.state.At(), held: top.Gather(r.Holdings)}
	if v.looking.IsZero() {
		return v.look()
	}
	v.pending = true
	return nil
}

func (v *topView) refreshDetails() {
	d := &v.shown
	id := idOf(&d.row)
	all := v.state.Table(top.Choice{Sort: v.choice.Sort, GPU: -1})
	d.ended = true
	for _, r := range all.Rows {
		if idOf(&r) != id {
			continue
		}
		d.row, d.ended = r, false
		if g := top.Gather(r.Holdings); g != nil {
			d.held = g
		}
	}
	d.clamp(v.detailRows(), len(d.uses()))
}

func (d *details) uses() []top.Use {
	if d.held == nil {
		return nil
	}
	return detailSections[d.section].of(d.held)
}

// turn goes to another list, at its beginning.
func (d *details) turn(by int) {
	d.section = step(d.sections(), d.section, by)
	d.scroll, d.open = scroll{}, false
}

func (v *topView) keyDetails(k string) tea.Cmd {
	d := &v.shown
	if d.key(k, v.detailRows(), len(d.uses())) {
		return nil
	}
	switch k {
	case "esc", "backspace":
		if d.open {
			d.open = false
			return nil
		}
		v.mode = modeList
		v.refresh()
		return nil
	case "tab", "right", "l":
		d.turn(1)
	case "shift+tab", "left", "h":
		d.turn(-1)
	case "enter":
		d.open = !d.open && len(d.uses()) > 0
	}
	d.clamp(v.detailRows(), len(d.uses()))
	return nil
}
