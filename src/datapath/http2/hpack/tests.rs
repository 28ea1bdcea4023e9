//! Vectors of RFC 7541 appendix C, errors, and comparison with an independent decoder.

use proptest::prelude::*;

use super::*;

type Field = (Vec<u8>, Vec<u8>);

fn hex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text.bytes().filter(u8::is_ascii_hexdigit).collect();
    let pairs = digits.chunks(2);
    let octet = |pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap();
    pairs.map(octet).collect()
}

fn decode(decoder: &mut Decoder, block: &[u8]) -> Result<Vec<Field>, HpackError> {
    let mut fields = Vec::new();
    decoder.decode(block, &mut |name, value| {
        fields.push((name.to_vec(), value.to_vec()));
    })?;
    Ok(fields)
}

fn decode_first(block: &[u8]) -> Result<Vec<Field>, HpackError> {
    decode(&mut Decoder::default(), block)
}

/// Asserts what the blocks of one connection decode to, and the size of the table after each.
fn check(blocks: &[(&str, &str, usize)]) {
    let mut decoder = Decoder::default();
    for (block, want, size) in blocks {
        let fields = decode(&mut decoder, &hex(block)).unwrap();
        let line = |(name, value): &Field| {
            let [name, value] = [name, value].map(|text| String::from_utf8_lossy(text));
            format!("{name}: {value}\n")
        };
        let got: String = fields.iter().map(line).collect();
        assert_eq!(got, *want);
        assert_eq!(decoder.table.size(), *size, "{want}");
    }
}

const REQUESTS: [&str; 3] = [
    ":method: GET\n:scheme: http\n:path: /\n:authority: www.example.com\n",
    ":method: GET\n:scheme: http\n:path: /\n:authority: www.example.com\n\
     cache-control: no-cache\n",
    ":method: GET\n:scheme: https\n:path: /index.html\n:authority: www.example.com\n\
     custom-key: custom-value\n",
];

const RESPONSES: [&str; 3] = [
    ":status: 302\ncache-control: private\ndate: Mon, 21 Oct 2013 20:13:21 GMT\n\
     location: https://www.example.com\n",
    ":status: 307\ncache-control: private\ndate: Mon, 21 Oct 2013 20:13:21 GMT\n\
     location: https://www.example.com\n",
    ":status: 200\ncache-control: private\ndate: Mon, 21 Oct 2013 20:13:22 GMT\n\
     location: https://www.example.com\ncontent-encoding: gzip\n\
     set-cookie: foo=ASDJKHQKBZXOQWEOPIUAXQWEOIU; max-age=3600; version=1\n",
];

#[test]
fn integers_of_appendix_c_1() {
    for (octets, prefix, want) in [("0a", 5, 10), ("1f9a0a", 5, 1337), ("2a", 8, 42)] {
        let octets = hex(octets);
        let mut block = octets.as_slice();
        assert_eq!(integer(&mut block, prefix), Ok(want));
        assert!(block.is_empty());
    }
}

#[test]
fn representations_of_appendix_c_2() {
    let custom = "400a 6375 7374 6f6d 2d6b 6579 0d63 7573 746f 6d2d 6865 6164 6572";
    check(&[(custom, "custom-key: custom-header\n", 55)]);
    let path = "040c 2f73 616d 706c 652f 7061 7468";
    check(&[(path, ":path: /sample/path\n", 0)]);
    let password = "1008 7061 7373 776f 7264 0673 6563 7265 74";
    check(&[(password, "password: secret\n", 0)]);
    check(&[("82", ":method: GET\n", 0)]);
}

#[test]
fn requests_of_appendix_c_3_and_c_4() {
    let [first, second, third] = REQUESTS;
    check(&[
        ("8286 8441 0f77 7777 2e65 7861 6d70 6c65 2e63 6f6d", first, 57),
        ("8286 84be 5808 6e6f 2d63 6163 6865", second, 110),
        ("8287 85bf 400a 6375 7374 6f6d 2d6b 6579 0c63 7573 746f 6d2d 7661 6c75 65", third, 164),
    ]);
    check(&[
        ("8286 8441 8cf1 e3c2 e5f2 3a6b a0ab 90f4 ff", first, 57),
        ("8286 84be 5886 a8eb 1064 9cbf", second, 110),
        ("8287 85bf 4088 25a8 49e9 5ba9 7d7f 8925 a849 e95b b8e8 b4bf", third, 164),
    ]);
}

/// The table of these examples has 256 bytes, which the first block requests here (3fe101).
#[test]
fn responses_of_appendix_c_5_and_c_6() {
    let [first, second, third] = RESPONSES;
    check(&[
        (
            "3fe101 4803 3330 3258 0770 7269 7661 7465 611d 4d6f 6e2c 2032 3120 4f63 7420 3230 \
             3133 2032 303a 3133 3a32 3120 474d 546e 1768 7474 7073 3a2f 2f77 7777 2e65 7861 6d70 \
             6c65 2e63 6f6d",
            first,
            222,
        ),
        ("4803 3330 37c1 c0bf", second, 222),
        (
            "88c1 611d 4d6f 6e2c 2032 3120 4f63 7420 3230 3133 2032 303a 3133 3a32 3220 474d 54c0 \
             5a04 677a 6970 7738 666f 6f3d 4153 444a 4b48 514b 425a 584f 5157 454f 5049 5541 5851 \
             5745 4f49 553b 206d 6178 2d61 6765 3d33 3630 303b 2076 6572 7369 6f6e 3d31",
            third,
            215,
        ),
    ]);
    check(&[
        (
            "3fe101 4882 6402 5885 aec3 771a 4b61 96d0 7abe 9410 54d4 44a8 2005 9504 0b81 66e0 \
             82a6 2d1b ff6e 919d 29ad 1718 63c7 8f0b 97c8 e9ae 82ae 43d3",
            first,
            222,
        ),
        ("4883 640e ffc1 c0bf", second, 222),
        (
            "88c1 6196 d07a be94 1054 d444 a820 0595 040b 8166 e084 a62d 1bff c05a 839b d9ab 77ad \
             94e7 821d d7f2 e6c7 b335 dfdf cd5b 3960 d5af 2708 7f36 72c1 ab27 0fb5 291f 9587 3160 \
             65c0 03ed 4ee5 b106 3d50 07",
            third,
            215,
        ),
    ]);
}

#[test]
fn invalid_blocks_are_rejected() {
    use HpackError::*;
    let cases = [
        // Truncated integers and strings.
        (
            Truncated,
            "ff | ff80 | 40 | 4001 | 400161 | 40016102 | 4001 61 02 62 | 41 \
       | 41ff ffff 7f",
        ),
        // Integers of more than five octets, even if they are small.
        (
            Integer,
            "ff80 8080 8000 | ffff ffff ff0f | ffff ffff ffff ffff ffff ff7f \
       | 41ff ffff ffff 0f",
        ),
        // Index 0 and above both tables.
        (Index, "80 | be | ff00 | fff0ffff7f | 7e00 | 0f2f00"),
        // Above the limit of 4,096 and after a field.
        (TableSize, "3fe21f | 3fe1ffff7f | 8220 | 203fe11f8220"),
        // EOS; padding of eight ones; padding by zeros; incomplete codes.
        (
            Huffman,
            "0084 ffff ffff 00 | 0085 1fff ffff ff 00 | 0081 ff 00 | 0081 18 00 \
       | 0081 1e 00 | 0082 1fff 00 | 0082 fffe 00 | 0084 ffff fffc 00",
        ),
    ];
    for (want, blocks) in cases {
        for block in blocks.split('|') {
            assert_eq!(decode_first(&hex(block)), Err(want), "{block}");
        }
    }
}

#[test]
fn valid_limits_are_accepted() {
    for (block, fields) in [
        ("", 0),
        // Size updates at the beginning, of which the last decides.
        ("20 3fe11f", 0),
        ("20 20 3fe11f 82", 1),
        ("bd", 1),
        // An integer of five octets.
        ("3f e19f8000", 0),
        // Empty name, empty Huffman string, and padding of seven bits: `~` has 13, `0` 5 bits.
        ("0000 00", 1),
        ("0080 80", 1),
        ("0081 07 00", 1),
        ("0082 fffb 00", 1),
    ] {
        let got = decode_first(&hex(block)).unwrap_or_else(|error| panic!("{block}: {error:?}"));
        assert_eq!(got.len(), fields, "{block}");
    }
}

fn insertion(name: &[u8], value: &[u8]) -> Vec<u8> {
    let mut block = vec![0x40];
    for text in [name, value] {
        push_integer(&mut block, 0, 7, text.len());
        block.extend(text);
    }
    block
}

/// Appends an integer (RFC 7541 section 5.1) after the bits of `first`.
fn push_integer(block: &mut Vec<u8>, first: u8, prefix: u32, value: usize) {
    let prefix_max = (1 << prefix) - 1;
    if value < prefix_max {
        return block.push(first | u8::try_from(value).unwrap());
    }
    block.push(first | u8::try_from(prefix_max).unwrap());
    let mut rest = value - prefix_max;
    while rest >= 128 {
        block.push(0x80 | u8::try_from(rest % 128).unwrap());
        rest /= 128;
    }
    block.push(u8::try_from(rest).unwrap());
}

#[test]
fn the_table_evicts_the_oldest_entries_and_never_exceeds_its_limit() {
    let mut decoder = Decoder::default();
    // 128 entries of 32 bytes fill the table.
    let empty = insertion(b"", b"").repeat(200);
    assert_eq!(decode(&mut decoder, &empty).unwrap().len(), 200);
    assert_eq!(decoder.table.size(), 4096);
    assert!(decoder.table.get(61 + 128).is_ok());
    assert!(decoder.table.get(61 + 129).is_err());
    // An entry of exactly the limit replaces all others, and a larger one empties the table.
    let all = insertion(b"name", &[b'x'; 4096 - 32 - 4]);
    decode(&mut decoder, &all).unwrap();
    assert_eq!(decoder.table.size(), 4096);
    assert!(decoder.table.get(62).is_ok() && decoder.table.get(63).is_err());
    // A new entry may refer to the name of the entry that it evicts (RFC 7541 section 4.4).
    let fields = decode(&mut decoder, &[0x7e, 1, b'y']).unwrap();
    assert_eq!(fields, [(b"name".to_vec(), b"y".to_vec())]);
    assert_eq!(decoder.table.get(62), Ok((&b"name"[..], &b"y"[..])));
    assert!(decoder.table.get(63).is_err());
    let larger = insertion(b"name", &[b'x'; 4096 - 32 - 3]);
    assert_eq!(decode(&mut decoder, &larger).unwrap().len(), 1);
    assert_eq!(decoder.table.size(), 0);
    // A limit of 0 lets nothing in, and may be raised again.
    decode(&mut decoder, &[&[0x20][..], &insertion(b"a", b"b")].concat()).unwrap();
    assert_eq!(decoder.table.size(), 0);
    let raised = [&hex("3fe11f")[..], &insertion(b"a", b"b")].concat();
    decode(&mut decoder, &raised).unwrap();
    assert_eq!(decoder.table.size(), 34);
}

#[test]
fn a_status_decodes_to_itself() {
    for status in 100..1000 {
        let mut block = Vec::new();
        encode_status(status, &mut block);
        let want = (b":status".to_vec(), status.to_string().into_bytes());
        assert_eq!(decode_first(&block), Ok(vec![want]));
        let indexed = INDEXED_STATUSES.contains(&status);
        assert_eq!(block.len(), if indexed { 1 } else { 5 }, "{status}");
    }
}

fn other_decoder() -> loona_hpack::Decoder<'static> {
    let mut other = loona_hpack::Decoder::new();
    other.set_max_allowed_table_size(TABLE_BYTES_MAX);
    other
}

/// Random field representation, mostly valid.
fn representation() -> impl Strategy<Value = Vec<u8>> {
    let text = prop_oneof![
        "[a-z]{0,12}".prop_map(String::into_bytes),
        prop::collection::vec(any::<u8>(), 0..300),
    ];
    let string = (text, any::<bool>()).prop_map(|(text, huffman)| {
        let mut block = Vec::new();
        let (first, text) = if huffman { (0x80, huffman_code(&text)) } else { (0, text) };
        push_integer(&mut block, first, 7, text.len());
        block.extend(text);
        block
    });
    let form = prop_oneof![Just((0x40, 6)), Just((0, 4)), Just((0x10, 4))];
    let index = prop_oneof![8 => 0_usize..64, 1 => 60_usize..140];
    prop_oneof![
        3 => index.clone().prop_map(|index| {
            let mut block = Vec::new();
            push_integer(&mut block, 0x80, 7, index);
            block
        }),
        6 => (form, index, string.clone(), string).prop_map(|(form, index, name, value)| {
            let (first, prefix) = form;
            let mut block = Vec::new();
            push_integer(&mut block, first, prefix, index);
            if index == 0 {
                block.extend(name);
            }
            block.extend(value);
            block
        }),
    ]
}

/// Returns the Huffman code of `text`, which the other decoder has to accept.
fn huffman_code(text: &[u8]) -> Vec<u8> {
    let (mut octets, mut bits, mut count) = (Vec::new(), 0_u64, 0);
    for octet in text {
        let (code, length) = huffman::code(*octet);
        bits = bits << length | u64::from(code);
        count += length;
        while count >= 8 {
            count -= 8;
            octets.push(u8::try_from(bits >> count & 0xff).unwrap());
        }
    }
    if count > 0 {
        let padded = (bits << (8 - count) | (0xff >> count)) & 0xff;
        octets.push(u8::try_from(padded).unwrap());
    }
    octets
}

proptest! {
    #[test]
    fn fields_agree_with_another_decoder(
        blocks in prop::collection::vec(
            (
                prop::option::weighted(0.2, 0_usize..4097),
                prop::collection::vec(representation(), 0..8),
            ),
            1..6,
        ),
    ) {
        let (mut ours, mut other) = (Decoder::default(), other_decoder());
        for (size, representations) in blocks {
            let mut block = Vec::new();
            if let Some(size) = size.filter(|_| !representations.is_empty()) {
                push_integer(&mut block, 0x20, 5, size);
            }
            block.extend(representations.concat());
            let fields = decode(&mut ours, &block).ok();
            prop_assert_eq!(&fields, &other.decode(&block).ok());
            if fields.is_none() {
                break;
            }
        }
    }

    #[test]
    fn random_octets_agree_with_another_decoder(
            block in prop::collection::vec(any::<u8>(), 0..64),
        ) {
        match decode_first(&block) {
            // A block of size updates alone is valid (RFC 7541 section 4.2), and the other one
            // rejects it.
            Ok(fields) if fields.is_empty() => {}
            Ok(fields) => prop_assert_eq!(other_decoder().decode(&block).ok(), Some(fields)),
            // The other one accepts a size update after a field.
            Err(HpackError::TableSize) => {}
            Err(_) => prop_assert!(other_decoder().decode(&block).is_err()),
        }
    }
}
