package process

import (
	"fmt"
	"os"
	"path/filepath"
)

// StateDir returns the user's folder for what programs keep: $XDG_STATE_HOME/tandem, or
// ~/.local/state/tandem. It may not exist yet.
func StateDir() (string, error) {
	state := os.Getenv("XDG_STATE_HOME")
	if state == "" {
		home, err := os.UserHomeDir()
		if err != nil {
			return "", fmt.Errorf("process: no home directory: %w", err)
		}
		state = filepath.Join(home, ".local", "state")
	}
	return filepath.Join(state, "tandem"), nil
}
