//! Lines of the conformance table that the server does not meet.

/// Section and name of the line, and the result.
pub(super) const OF_H2: &[(&str, &str)] = &[
    ("3.4 PING before SETTINGS", "h2: ignored"),
    ("3.4 HEADERS before SETTINGS", "h2: status 200"),
    ("3.4 ACK before SETTINGS", "h2: ignored"),
    (
        "6.5.2 window, [(4, 2147483648)]",
        "h2: connection error PROTOCOL_ERROR",
    ),
    (
        "6.5.2 window, [(4, 4294967295)]",
        "h2: connection error PROTOCOL_ERROR",
    ),
    (
        "6.5 ACK with a payload",
        "h2: connection error PROTOCOL_ERROR",
    ),
    (
        "6.5 SETTINGS of 5 bytes",
        "h2: connection error PROTOCOL_ERROR",
    ),
    (
        "6.5 SETTINGS of 7 bytes",
        "h2: connection error PROTOCOL_ERROR",
    ),
    ("6.7 PING of 7 bytes", "h2: connection error PROTOCOL_ERROR"),
    ("6.7 PING of 9 bytes", "h2: connection error PROTOCOL_ERROR"),
    ("6.7 empty PING", "h2: connection error PROTOCOL_ERROR"),
    (
        "6.8 GOAWAY of 7 bytes",
        "h2: connection error PROTOCOL_ERROR",
    ),
    ("4.3 index 0", "h2: connection error PROTOCOL_ERROR"),
    (
        "4.3 index above the tables",
        "h2: connection error PROTOCOL_ERROR",
    ),
    (
        "4.3 integer of six octets",
        "h2: connection error PROTOCOL_ERROR",
    ),
    (
        "4.3 truncated string",
        "h2: connection error PROTOCOL_ERROR",
    ),
    ("4.3 truncated block", "h2: connection error PROTOCOL_ERROR"),
    ("4.3 EOS in a string", "h2: connection error PROTOCOL_ERROR"),
    (
        "4.3 padding of eight bits",
        "h2: connection error PROTOCOL_ERROR",
    ),
    (
        "4.3 table size update to 4,097",
        "h2: connection error PROTOCOL_ERROR",
    ),
    (
        "4.3 table size update after a field",
        "h2: connection error PROTOCOL_ERROR",
    ),
    (
        "8.2 upper case in a name",
        "h2: connection error PROTOCOL_ERROR",
    ),
    ("8.2 space in a name", "h2: connection error PROTOCOL_ERROR"),
    ("8.2 colon in a name", "h2: connection error PROTOCOL_ERROR"),
    ("8.2 NUL in a name", "h2: connection error PROTOCOL_ERROR"),
    ("8.2 DEL in a name", "h2: connection error PROTOCOL_ERROR"),
    (
        "8.2 an octet above 0x7f in a name",
        "h2: connection error PROTOCOL_ERROR",
    ),
    ("8.2 empty name", "h2: connection error PROTOCOL_ERROR"),
    ("8.2 NUL in a value", "h2: connection error PROTOCOL_ERROR"),
    ("8.2 LF in a value", "h2: connection error PROTOCOL_ERROR"),
    ("8.2 CR in a value", "h2: connection error PROTOCOL_ERROR"),
    ("8.2 space before a value", "h2: accepted"),
    ("8.2 tab after a value", "h2: accepted"),
    ("8.3 unknown", "h2: connection error PROTOCOL_ERROR"),
    ("8.5 no :authority", "h2: status 400"),
    (
        "8.5 trailers with invalid HPACK",
        "h2: connection error PROTOCOL_ERROR",
    ),
    (
        "5.1 HEADERS with END_STREAM in state half-closed (local)",
        "h2: ignored",
    ),
    (
        "4.2 SETTINGS of 2^24 - 1 bytes",
        "h2: connection error ENHANCE_YOUR_CALM",
    ),
    (
        "5.1 DATA in state half-closed (remote)",
        "h2: connection error PROTOCOL_ERROR",
    ),
    (
        "5.1 HEADERS in state half-closed (remote)",
        "h2: stream error PROTOCOL_ERROR",
    ),
    (
        "5.1 HEADERS with END_STREAM in state half-closed (remote)",
        "h2: connection error PROTOCOL_ERROR",
    ),
    (
        "6.3 PRIORITY of 4 bytes",
        "h2: connection error PROTOCOL_ERROR",
    ),
    (
        "6.3 PRIORITY of 6 bytes",
        "h2: connection error PROTOCOL_ERROR",
    ),
    (
        "6.4 RST_STREAM of 3 bytes",
        "h2: connection error PROTOCOL_ERROR",
    ),
    (
        "6.4 RST_STREAM of 5 bytes",
        "h2: connection error PROTOCOL_ERROR",
    ),
    (
        "6.9 WINDOW_UPDATE of 3 bytes",
        "h2: connection error PROTOCOL_ERROR",
    ),
    (
        "6.9 WINDOW_UPDATE of 5 bytes on a stream",
        "h2: connection error PROTOCOL_ERROR",
    ),
    (
        "6.9 WINDOW_UPDATE of 0 for a stream",
        "h2: connection error PROTOCOL_ERROR",
    ),
];
