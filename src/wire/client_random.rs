//! Parser of the random of a ClientHello, which identifies the same ClientHello on another
//! connection.

/// Random of a ClientHello (RFC 8446 section 4.1.2).
pub type ClientRandom = [u8; 32];

/// Content type of a handshake record (RFC 8446 section 5.1).
const HANDSHAKE: u8 = 22;
/// Message type of a ClientHello (RFC 8446 section 4).
const CLIENT_HELLO: u8 = 1;
/// Bytes before the random: message type, length and legacy version.
const HEAD_BYTES: usize = 4 + 2;

/// Returns the random of the ClientHello at the start of `bytes`, which may span several records
/// and be incomplete. Returns `None` if `bytes` hold no ClientHello, or end before its random
/// does.
pub fn client_random(mut bytes: &[u8]) -> Option<ClientRandom> {
    let (mut head, mut filled) = ([0; HEAD_BYTES + 32], 0);
    while filled < head.len() {
        let (&[kind, _, _, high, low], rest) = bytes.split_first_chunk()?;
        let length = usize::from(u16::from_be_bytes([high, low]));
        if kind != HANDSHAKE || length == 0 {
            return None;
        }
        let (payload, next) = rest.split_at(length.min(rest.len()));
        let room = head.get_mut(filled..)?;
        let taken = payload.len().min(room.len());
        room.get_mut(..taken)?.copy_from_slice(payload.get(..taken)?);
        (filled, bytes) = (filled + taken, next);
    }
    let (&kind, random) = (head.first()?, head.last_chunk()?);
    (kind == CLIENT_HELLO).then_some(*random)
}

/// Returns the number of bytes up to the end of the ClientHello at the start of `bytes`. Returns
/// `None` if there is none, or if it is not in one record.
pub fn client_hello_bytes(bytes: &[u8]) -> Option<usize> {
    let (&[kind, _, _, high, low], message) = bytes.split_first_chunk()?;
    let (&[CLIENT_HELLO, length @ ..], _) = message.split_first_chunk::<4>()? else {
        return None;
    };
    let [first, second, third] = length;
    let end = 4 + u32::from_be_bytes([0, first, second, third]) as usize;
    let is_whole = kind == HANDSHAKE && end <= usize::from(u16::from_be_bytes([high, low]));
    is_whole.then_some(5 + end)
}

#[cfg(test)]
mod tests {
    use super::*;

    const RANDOM: ClientRandom = [7; 32];

    fn message(kind: u8) -> Vec<u8> {
        let mut message = vec![kind, 0, 0, 100, 3, 3];
        message.extend(RANDOM);
        message.extend([0; 66]);
        message
    }

    fn records(message: &[u8], size: usize) -> Vec<u8> {
        let record = |part: &[u8]| {
            let length = u16::try_from(part.len()).expect("short").to_be_bytes();
            [&[22, 3, 1], &length[..], part].concat()
        };
        message.chunks(size).flat_map(record).collect()
    }

    #[test]
    fn the_random_is_found_however_the_hello_is_cut_into_records() {
        for size in [1, 5, 37, 38, 39, 200] {
            let bytes = records(&message(1), size);
            assert_eq!(client_random(&bytes), Some(RANDOM), "{size}");
        }
        assert_eq!(client_random(&records(&message(1), 200)[..43]), Some(RANDOM));
    }

    #[test]
    fn the_end_of_a_hello_in_one_record_is_found_before_all_of_it_has_arrived() {
        let hello = records(&message(1), 200);
        assert_eq!(client_hello_bytes(&hello), Some(5 + 104));
        assert_eq!(client_hello_bytes(&hello[..20]), Some(5 + 104));
        let more = records(&[message(1), message(1)].concat(), 300);
        assert_eq!(client_hello_bytes(&more), Some(5 + 104));
        for other in [
            records(&message(1), 103),
            records(&message(2), 200),
            hello[..8].to_vec(),
            b"GET / HTTP/1.1".to_vec(),
        ] {
            assert_eq!(client_hello_bytes(&other), None);
        }
    }

    #[test]
    fn what_is_no_hello_or_ends_early_has_none() {
        let hello = records(&message(1), 200);
        for length in 0..43 {
            assert_eq!(client_random(&hello[..length]), None, "{length}");
        }
        assert_eq!(client_random(&records(&message(2), 200)), None, "a ServerHello");
        assert_eq!(client_random(b"GET / HTTP/1.1\r\nhost: a.example.com\r\n\r\n....."), None);
        assert_eq!(client_random(&[22, 3, 1, 0, 0].repeat(20)), None, "empty records");
    }
}
