package program

import (
	"os"
	"runtime/debug"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestVersionOf(t *testing.T) {
	t.Parallel()
	revision := []debug.BuildSetting{{Key: "GOOS", Value: "linux"}, {Key: "vcs.revision", Value: "0123456789abcdef"}}
	for want, info := range map[string]debug.BuildInfo{
		"":             {},
		"v1.4.2":       {Main: debug.Module{Version: "v1.4.2"}, Settings: revision},
		"0123456789ab": {Main: debug.Module{Version: "(devel)"}, Settings: revision},
		"abc":          {Settings: []debug.BuildSetting{{Key: "vcs.revision", Value: "abc"}}},
	} {
		require.Equal(t, want, versionOf(&info))
	}
}

func TestHost(t *testing.T) {
	t.Parallel()
	host, err := os.Hostname()
	require.NoError(t, err)
	require.Equal(t, host, Host())
	require.NotEmpty(t, Library())
}
