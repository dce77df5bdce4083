package pytorch

import (
	"fmt"

	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/recording/internal/input"
)

// Roles. A container's place is read off the stack below it: a MARK above its list, the list itself (APPEND of one
// item has no MARK), a sibling that the list has not taken yet, or a key.

func (m *machine) newDict() error {
	if len(m.stack) == 0 {
		if m.rootMade {
			return fmt.Errorf("a second snapshot; expected STOP")
		}
		m.rootMade = true
		return m.push(value{k: kRoot})
	}
	top := &m.stack[len(m.stack)-1]
	at := top.k
	if at == kMark || at == kEvent || at == kSegment || at == kBlock || at == kFrame {
		// The list below the MARK: this is its next item.
		if p := m.lastMark(); p > 0 && (at == kMark || m.stack[p-1].k == listOf[at]) {
			if at == kEvent {
				// The entry below is complete. Its slot serves for this one too: the list gets them all.
				if err := m.closeEvent(); err != nil {
					return err
				}
				top.u = m.evCount
				return m.openEvent(int(m.stack[p-1].u))
			}
			at = m.stack[p-1].k
		}
	}
	switch at {
	case kTrace:
		dev := int(top.u)
		if top.k == kMark {
			dev = int(m.stack[len(m.stack)-2].u)
		}
		if err := m.push(value{kEvent, m.evCount}); err != nil {
			return err
		}
		return m.openEvent(dev)
	case kSegments:
		return m.openSegment()
	case kBlocks:
		return m.openBlock()
	case kFrames:
		var err error
		if m.frames, err = input.Grow(m.b, m.frames, 16); err != nil {
			return err
		}
		m.frames = append(m.frames, rawFrame{none, none, 0, none})
		return m.push(value{kFrame, uint64(len(m.frames) - 1)})
	case kStr:
		switch parent := m.parentDict(); parent.k {
		case kRoot:
			if top.u == sAllocatorSettings {
				if m.hasSettings {
					return fmt.Errorf("allocator_settings a second time")
				}
				m.hasSettings = true
				return m.push(value{k: kSettings})
			}
			if top.u == sEnvironment && !m.hasEnvironment {
				m.hasEnvironment = true
				return m.push(value{k: kEnvironment})
			}
			if below := m.below(); below == kSettings || below == kEnvironment {
				return m.openSubSettings()
			}
		case kSettings, kEnvironment:
			return m.openSubSettings()
		case kEvent, kBlock:
			if top.u == sUserMetadata {
				return m.openLabel()
			}
		}
	}
	return m.push(value{k: kSkipDict})
}

func (m *machine) openSubSettings() error {
	m.subSettings++
	return m.push(value{kSubSettings, uint64(m.subSettings - 1)})
}

// below is the kind of what lies right under the top of the stack.
func (m *machine) below() kind {
	if len(m.stack) < 2 {
		return kNone
	}
	return m.stack[len(m.stack)-2].k
}

// listOf is the list that a kind of dict is an item of.
var listOf = [numKinds]kind{kEvent: kTrace, kSegment: kSegments, kBlock: kBlocks, kFrame: kFrames}

func (m *machine) lastMark() int {
	if len(m.marks) == 0 {
		return 0
	}
	return m.marks[len(m.marks)-1]
}

// parentDict is the dict that a value pushed now would belong to, with its key on top of the stack: the one below the
// last MARK, or, for SETITEM without a MARK, the one right below the key.
func (m *machine) parentDict() value {
	n := len(m.stack)
	if p := m.lastMark(); len(m.marks) > 0 && p > 0 && (n-1-p)%2 == 1 {
		return m.stack[p-1]
	}
	if n >= 2 {
		return m.stack[n-2]
	}
	return value{}
}

func (m *machine) newList() error {
	n := len(m.stack)
	if n == 0 {
		return m.push(value{k: kSkipList})
	}
	top := m.stack[n-1]
	switch top.k {
	case kStr:
		switch parent := m.parentDict(); parent.k {
		case kRoot:
			switch top.u {
			case sDeviceTraces:
				if m.tracesMade {
					return fmt.Errorf("device_traces a second time")
				}
				m.tracesMade = true
				return m.push(value{k: kTraces})
			case sSegments:
				if m.segmentsMade {
					return fmt.Errorf("segments a second time")
				}
				m.segmentsMade = true
				return m.push(value{k: kSegments})
			}
		case kSegment:
			switch top.u {
			case sBlocks:
				s := &m.segments[parent.u]
				if s.blocksMade {
					return fmt.Errorf("blocks a second time")
				}
				s.blocksMade, s.first = true, uint32(len(m.blocks))
				return m.push(value{kBlocks, parent.u})
			case sFrames:
				return m.openFrames()
			}
		case kEvent, kBlock:
			if top.u == sFrames {
				return m.openFrames()
			}
		}
	case kMark:
		if n >= 2 && m.stack[n-2].k == kTraces {
			return m.openTrace()
		}
	case kTraces:
		return m.openTrace()
	case kTrace:
		if p := m.lastMark(); p > 0 && m.stack[p-1].k == kTraces {
			return m.openTrace()
		}
	}
	return m.push(value{k: kSkipList})
}

func (m *machine) openTrace() error {
	if len(m.devices) >= recording.MaxDevices {
		return fmt.Errorf("more than %d devices", recording.MaxDevices)
	}
	m.devices = append(m.devices, &rawTrace{pools: map[uint32]uint32{0: 0}, poolIDs: []recording.PoolID{{}}})
	return m.push(value{kTrace, uint64(len(m.devices) - 1)})
}

func (m *machine) openEvent(dev int) error {
	if m.evOpen {
		return fmt.Errorf("a trace entry inside another")
	}
	m.ev, m.evHas, m.evDev, m.evOpen, m.evLabel = event.Event{}, 0, dev, true, said{}
	m.evCount++
	return nil
}

// closeEvent checks the entry that is complete now and adds it to its device.
func (m *machine) closeEvent() error {
	d := m.devices[m.evDev]
	if !m.evOpen {
		return fmt.Errorf("a trace entry that is not new")
	}
	m.evOpen = false
	var missing string
	switch {
	case m.evHas&hasAction == 0:
		missing = "action"
	case m.ev.Kind == event.None: // an action that we do not know: counted in setEvent
		return nil
	case m.evHas&hasAddr == 0 && m.ev.Kind <= event.SegmentUnmap:
		missing = "addr"
	case m.evHas&hasSize == 0 && (m.ev.Kind <= event.SegmentUnmap || m.ev.Kind == event.OOM):
		missing = "size"
	}
	if missing != "" {
		return &recording.Error{Offset: m.in.Offset(), Device: m.evDev, Event: d.N,
			Msg: fmt.Sprintf("the trace entry has no %q", missing)}
	}
	if m.evHas&hasStream == 0 {
		m.ev.Stream = d.streams.ID(0)
	}
	if m.evHas&hasTime == 0 {
		d.noTime++
	}
	if m.evLabel != (said{}) {
		if err := m.labelEvent(d); err != nil {
			return err
		}
	}
	return d.Add(m.b, m.ev)
}

func (m *machine) openSegment() error {
	var err error
	if m.segments, err = input.Grow(m.b, m.segments, 72); err != nil {
		return err
	}
	m.segments = append(m.segments, rawSegment{pool: none})
	return m.push(value{kSegment, uint64(len(m.segments) - 1)})
}

func (m *machine) openBlock() error {
	s := &m.segments[len(m.segments)-1]
	if int(s.first+s.n) != len(m.blocks) {
		return fmt.Errorf("a block in the list of another segment")
	}
	var err error
	if m.blocks, err = input.Grow(m.b, m.blocks, rawBlockSize); err != nil {
		return err
	}
	m.blocks = append(m.blocks, rawBlock{})
	s.n++
	return m.push(value{kBlock, uint64(len(m.blocks) - 1)})
}

func (m *machine) openFrames() error {
	if err := m.closeFrames(); err != nil {
		return err
	}
	var err error
	if m.listStack, err = input.Grow(m.b, m.listStack, 4); err != nil {
		return err
	}
	m.curList, m.curOpen = uint64(len(m.listStack)), true
	m.curIDs = m.curIDs[:0]
	m.listStack = append(m.listStack, 0)
	return m.push(value{kFrames, m.curList})
}

// closeFrames gives the list that was being filled its stack.
func (m *machine) closeFrames() error {
	if !m.curOpen {
		return nil
	}
	m.curOpen = false
	id, err := m.stacks.stack(m.curIDs)
	m.listStack[m.curList] = id
	return err
}

// stackOf is the stack that a value under "frames" is.
func (m *machine) stackOf(v value) (uint32, error) {
	switch v.k {
	case kFrames:
		if m.curOpen && v.u == m.curList {
			if err := m.closeFrames(); err != nil {
				return 0, err
			}
		}
		return m.listStack[v.u], nil
	case kNone, kSkipList:
		return 0, nil
	}
	return 0, fmt.Errorf("frames is %s; expected a list", v.k)
}
