// Package program says what this process is: the machine that it runs on, and the versions that it was built
// of.
package program

import (
	"cmp"
	"os"
	"runtime/debug"
	"sync"
)

// Host is the machine's name.
var Host = sync.OnceValue(func() string {
	host, _ := os.Hostname()
	return cmp.Or(host, "unknown")
})

// Library is the version of this library in the program, "(devel)" if the program does not know.
func Library() string {
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, m := range append(info.Deps, &info.Main) {
			if m.Path == "github.com/onceq/onceq" && m.Replace == nil && m.Version != "" {
				return m.Version
			}
		}
	}
	return "(devel)"
}

// Version is the program's own version: that of its main module, or else the revision that it was built of.
// It is empty if the build says neither.
var Version = sync.OnceValue(func() string {
	if info, ok := debug.ReadBuildInfo(); ok {
		return versionOf(info)
	}
	return ""
})

func versionOf(info *debug.BuildInfo) string {
	if v := info.Main.Version; v != "" && v != "(devel)" {
		return v
	}
	for _, s := range info.Settings {
		if s.Key == "vcs.revision" {
			return s.Value[:min(len(s.Value), 12)]
		}
	}
	return ""
}
