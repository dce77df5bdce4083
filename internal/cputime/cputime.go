// Package cputime is how long processors have worked for somebody: unlike the time that passes, it leaves out for how long
// others had them, or the machine's own host, where those are busy.
package cputime
