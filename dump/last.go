package dump

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"
)

// The last of the files of a process is of its newest failure. A program that catches the first ones, as one does that looks
// for the batch size that fits, and a server that tries again, dies of another, hours later: that is the one to explain.

// share is what it may cost to write the last file anew: of the time from the beginning of one to the beginning of the next
// one part in so many, however long its history takes to write. So a loop of failures that are caught stays cheap.
const share = 20

// lastFile is where the newest failure is written. It belongs to the thread that makes a file (Reporter.writing), but for said
// and failed, which are guarded by the Reporter's mutex.
type lastFile struct {
	name  string
	is    os.FileInfo // what was written there
	names int         // in this folder

	said, failed bool // a line has said where it is; that it could not be written
}

// place is the name of the last file in a folder. It stays the same until something else lies there, as processes of other
// containers have the same number, and the folder may have been cleared. It is "" where that goes on and on.
func (l *lastFile) place(dir string) string {
	if filepath.Dir(l.name) != dir {
		l.name, l.is, l.names = "", nil, 0
	}
	// Its number says little: it is given to the next file once one is removed, and some file systems number what they have anew.
	if st, err := os.Lstat(l.name); err == nil && l.is != nil && st.Mode() == l.is.Mode() && st.Size() == l.is.Size() && st.ModTime().Equal(l.is.ModTime()) {
		return l.name
	}
	if name := fileFor(dir, MostFiles); name != l.name {
		if l.names == MostFiles {
			return ""
		}
		l.name = name
		l.names++
	}
	l.is = nil
	return l.name
}

// written notes that a file is in its place.
func (l *lastFile) written() {
	if st, err := os.Lstat(l.name); err == nil {
		l.is = st
	}
}

// errNoPlace is of a folder in which the last file is not left alone.
var errNoPlace = errors.New("other programs created files in its place again and again")

// due reports whether the last file may be written anew.
func (r *Reporter) due() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return !r.stuck && !time.Now().Before(r.next)
}

// spaceOut leaves the last file alone for as long as making one, begun then, is worth.
func (r *Reporter) spaceOut(began time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.next = began.Add(share * time.Since(began))
}

// sayLast says where the last file is, or why there is none: each once, as one may be tried every few seconds for days.
func (r *Reporter) sayLast(what string, j *job, child bool, err error) {
	r.mu.Lock()
	said := &r.last.said
	if err != nil {
		said = &r.last.failed
	}
	before := *said
	*said = true
	r.mu.Unlock()
	switch {
	case before:
	case err != nil:
		r.say(fmt.Sprintf("%s: no file of it: %v; that is not said of later ones", what, err))
	case child: // what it says would be of another failure than the file beside it
		r.say(j.wrote(what) + " (it is not started here: of later failures the newest takes the file's place)")
	default:
		r.say(j.wrote(what) + "; of later failures the newest takes its place")
	}
}
