// Package cputime is the CPU time of processes and threads: unlike elapsed time, it leaves out what other processes, or the
// machine's own host, took on a busy machine.
package cputime
