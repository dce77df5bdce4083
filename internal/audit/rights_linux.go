package audit

import (
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// rights says whether the kernel gives a program other rights than those of its user, which is when the dynamic
// linker heeds no environment. A program of one's own user that is setuid is given none.
func rights(f *os.File) string {
	st, err := f.Stat()
	if err != nil {
		return ""
	}
	owner, ok := st.Sys().(*syscall.Stat_t)
	if !ok {
		return ""
	}
	if st.Mode()&os.ModeSetuid != 0 && int(owner.Uid) != os.Getuid() || st.Mode()&os.ModeSetgid != 0 && int(owner.Gid) != os.Getgid() {
		return "runs with the rights of its owner (setuid or setgid)"
	}
	if n, err := unix.Fgetxattr(int(f.Fd()), "security.capability", nil); err == nil && n > 0 && os.Getuid() != 0 {
		return "has rights of its own (setcap)"
	}
	return ""
}
