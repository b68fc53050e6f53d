package gateway

import (
	"time"

	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

// CheckBundle says whether a gateway could serve a node's model: its tokenizer
// and chat template are read as they will be. Nodes ask before they start, so
// that a torn file ends the node and not every gateway's hope.
func CheckBundle(b *nodepb.Bundle) error {
	_, err := newModel(b, "", "", time.Time{})
	return err
}
