package main

import (
	"fmt"
	"syscall"
)

func inNamespace() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGTERM}
}

// shrink makes a tmpfs as small as its contents. EINVAL means that these have grown in the meantime.
func shrink(dir string) error {
	var s syscall.Statfs_t
	if err := syscall.Statfs(dir, &s); err != nil {
		return err
	}
	return resize(dir, (int64(s.Blocks)-int64(s.Bfree))*s.Bsize)
}

// resize sets the limit of a tmpfs, in bytes.
func resize(dir string, size int64) error {
	return syscall.Mount("tmpfs", dir, "tmpfs", syscall.MS_REMOUNT, fmt.Sprint("size=", size))
}
