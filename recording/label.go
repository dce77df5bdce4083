package recording

import (
	"strconv"
)

// TagName is what a tag is called: "" for none, "tag 7" where the file has no name for it.
func (t *Trace) TagName(tag uint16) string { return nameIn(t.Tags, int(tag), "tag ") }

// LibraryName is what a library is called: "" for none, "library 7" where the file has no name for it.
func (t *Trace) LibraryName(library uint8) string {
	return nameIn(t.Libraries, int(library), "library ")
}

// ThreadName is a thread's name and number: "" for none.
func (t *Trace) ThreadName(thread uint32) string {
	if thread == 0 {
		return ""
	}
	number := strconv.FormatUint(uint64(thread), 10)
	if name := t.Threads[thread]; name != "" {
		return name + " " + number
	}
	return number
}

func nameIn(names []string, i int, word string) string {
	switch {
	case i == 0:
		return ""
	case i < len(names) && names[i] != "":
		return names[i]
	}
	return word + strconv.Itoa(i)
}

// Labelled says which labels any event or block of the trace has.
func (t *Trace) Labelled() (tags, libraries, threads bool) {
	for i := range t.Events {
		e := &t.Events[i]
		tags, libraries, threads = tags || e.Tag != 0, libraries || e.Library != 0, threads || e.Thread != 0
	}
	for i := range t.Initial {
		b := &t.Initial[i]
		tags, libraries = tags || b.Tag != 0, libraries || b.Library != 0
	}
	return tags, libraries, threads
}
