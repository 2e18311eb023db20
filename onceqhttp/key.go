package onceqhttp

import (
	"errors"
	"fmt"
	"net/http"
	"strings"

	"github.com/dunglas/httpsfv"
)

// MaxKeyLength is how many characters of ASCII a key has at most, as with Stripe.
const MaxKeyLength = 255

const (
	keyHeader      = "Idempotency-Key"
	replayedHeader = "Idempotent-Replayed"
)

// ErrKeyMissing: the request has no Idempotency-Key.
var ErrKeyMissing = errors.New("onceqhttp: no Idempotency-Key")

// KeyError says why an Idempotency-Key was refused. It does not repeat the key.
type KeyError struct{ Reason string }

func (e *KeyError) Error() string { return "onceqhttp: Idempotency-Key " + e.Reason }

func badKey(format string, args ...any) error { return &KeyError{fmt.Sprintf(format, args...)} }

// ParseKey gives the request's idempotency key: 1 to MaxKeyLength characters of printable ASCII, not all of them spaces.
// No header is ErrKeyMissing; anything else that is not a key is a *KeyError.
//
// The value is a String of RFC 9651 (RFC 8941), "in quotes", as draft-ietf-httpapi-idempotency-key-header-07 says; its
// parameters are ignored. Without quotes, as most clients send it, everything counts but spaces, commas, semicolons,
// quotes and backslashes, and values of RFC 9651 that are no String: Booleans, Dates and Byte Sequences, as ?1, @1 and :aGk=:. What
// could be a Token, an Integer or a Decimal there is taken for an unquoted key, letter for letter. Both ways of writing name the same key. A header that stands there twice is refused, also where a
// proxy has joined the two with a comma.
func ParseKey(h http.Header) (string, error) {
	values := h.Values(keyHeader)
	switch len(values) {
	case 0:
		return "", ErrKeyMissing
	case 1:
	default:
		return "", badKey("stands there %d times; send one", len(values))
	}
	key := strings.Trim(values[0], " \t")
	if strings.HasPrefix(key, `"`) {
		item, err := httpsfv.UnmarshalItem([]string{key})
		if err != nil {
			return "", badKey("is no structured-field string: %v", err)
		}
		key = item.Value.(string) // it began with a quote
	} else if i := strings.IndexFunc(key, func(c rune) bool {
		return c <= ' ' || c > '~' || strings.ContainsRune(`,;"\`, c)
	}); i >= 0 {
		return "", badKey(`has a character at byte %d that an unquoted key cannot have; put the key in quotes, as in Idempotency-Key: "a key"`, i)
	} else if item, err := httpsfv.UnmarshalItem([]string{key}); err == nil {
		switch item.Value.(type) {
		case httpsfv.Token, int64, float64:
		default:
			return "", badKey(`is a structured field of another type than String; put the key in quotes, as in Idempotency-Key: "a key"`)
		}
	}
	switch {
	case strings.Trim(key, " ") == "":
		return "", badKey("is empty")
	case len(key) > MaxKeyLength:
		return "", badKey("has %d characters; at most %d", len(key), MaxKeyLength)
	}
	return key, nil
}
