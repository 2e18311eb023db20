package onceqhttp

import (
	"errors"
	"fmt"
	"net/http"
	"strings"

	"github.com/dunglas/httpsfv"
)

// MaxKeyLength is the largest number of ASCII characters in a key. Stripe has the same limit.
const MaxKeyLength = 255

const (
	keyHeader      = "Idempotency-Key"
	replayedHeader = "Idempotent-Replayed"
)

// ErrKeyMissing means that the request has no Idempotency-Key.
var ErrKeyMissing = errors.New("onceqhttp: no Idempotency-Key")

// KeyError says why an Idempotency-Key was refused. It does not repeat the key.
type KeyError struct{ Reason string }

func (e *KeyError) Error() string { return "onceqhttp: Idempotency-Key " + e.Reason }

func badKey(format string, args ...any) error { return &KeyError{fmt.Sprintf(format, args...)} }

// ParseKey returns the request's idempotency key: 1 to MaxKeyLength characters of printable ASCII that are not all
// spaces. Without the header the error is ErrKeyMissing; for any other invalid key it is a *KeyError.
//
// In quotes the value is a String of RFC 9651 (RFC 8941), as draft-ietf-httpapi-idempotency-key-header-07 says; its
// parameters are ignored. Most clients send the key without quotes. Such a key contains no spaces, commas, semicolons,
// quotes or backslashes, and is not a Boolean, a Date or a Byte Sequence of RFC 9651, such as ?1, @1 or :aGk=:. A
// Token, an Integer or a Decimal is taken literally as an unquoted key. With and without quotes it is the same key. A
// header that is sent twice is refused, even if a proxy has joined the two with a comma.
func ParseKey(h http.Header) (string, error) {
	values := h.Values(keyHeader)
	switch len(values) {
	case 0:
		return "", ErrKeyMissing
	case 1:
	default:
		return "", badKey("was sent %d times; send one", len(values))
	}
	key := strings.Trim(values[0], " \t")
	if strings.HasPrefix(key, `"`) {
		item, err := httpsfv.UnmarshalItem([]string{key})
		if err != nil {
			return "", badKey("is not a structured-field string: %v", err)
		}
		key = item.Value.(string) // it begins with a quote
	} else if i := strings.IndexFunc(key, func(c rune) bool {
		return c <= ' ' || c > '~' || strings.ContainsRune(`,;"\`, c)
	}); i >= 0 {
		return "", badKey(`has a character at byte %d that an unquoted key cannot have; put the key in quotes, as in Idempotency-Key: "a key"`, i)
	} else if item, err := httpsfv.UnmarshalItem([]string{key}); err == nil {
		switch item.Value.(type) {
		case httpsfv.Token, int64, float64:
		default:
			return "", badKey(`is a structured field, but not a String; put the key in quotes, as in Idempotency-Key: "a key"`)
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
