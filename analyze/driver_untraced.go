package analyze

import (
	"fmt"
	"path"

	"github.com/cistern-gpu/cistern/recording"
)

// MostUntraced is how many processes that were not traced are named to people.
const MostUntraced = 8

// UntracedLine is a process that used the driver and could not be traced, in words.
func UntracedLine(u *recording.Untraced) string {
	return fmt.Sprintf("process %d, %s, used the driver and is not in this trace: it %s", u.PID, path.Base(u.Program), u.Why)
}

// UntracedLines are the first of them, and how many there are besides.
func UntracedLines(list []recording.Untraced) []string {
	var lines []string
	for i := range list[:min(len(list), MostUntraced)] {
		lines = append(lines, UntracedLine(&list[i]))
	}
	if more := len(list) - MostUntraced; more > 0 {
		least := ""
		if len(list) >= recording.MostUntraced {
			least = "at least "
		}
		lines = append(lines, fmt.Sprintf("nor are %s%d more that used it", least, more))
	}
	return lines
}
