//! The identity of a workload: one strict parse, for certificates and for the configuration.

use spiffe::SpiffeId;

/// The longest SPIFFE id (SPIFFE-ID section 2.3).
const ID_BYTES_MAX: usize = 2048;

/// Splits an identity of the form that Istio gives to workloads,
/// `spiffe://DOMAIN/ns/NAMESPACE/sa/ACCOUNT`, into trust domain, namespace and service account.
/// Nothing else is one.
pub fn parse_identity(uri: &str) -> Option<[&str; 3]> {
    let id = SpiffeId::new(uri).ok()?;
    // The crate lower-cases the trust domain; here a domain is compared byte for byte.
    if uri.len() > ID_BYTES_MAX || id.to_string() != uri {
        return None;
    }
    let mut parts = uri.strip_prefix("spiffe://")?.split('/');
    match [
        parts.next()?,
        parts.next()?,
        parts.next()?,
        parts.next()?,
        parts.next()?,
    ] {
        [domain, "ns", namespace, "sa", account] if parts.next().is_none() => {
            Some([domain, namespace, account])
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_plain_form_of_an_istio_identity_is_accepted() {
        let long = format!("spiffe://td/ns/{}/sa/x", "n".repeat(2048));
        let bad = [
            "spiffe://td",
            "spiffe://td/",
            "spiffe://td/ns/a/sa",
            "spiffe://td/ns/a/sa/",
            "spiffe://td/ns/a/sa/b/",
            "spiffe://td/ns/a/sa/b/c",
            "spiffe://td/ns//sa/b",
            "spiffe://td/ns/../sa/b",
            "spiffe://td/ns/./sa/b",
            "spiffe://td//ns/a/sa/b",
            "spiffe://td/sa/a/ns/b",
            "spiffe://td/ns/a/sa/b?x=1",
            "spiffe://td/ns/a/sa/b#x",
            "spiffe://td:443/ns/a/sa/b",
            "spiffe://user@td/ns/a/sa/b",
            "spiffe://TD/ns/a/sa/b",
            "SPIFFE://td/ns/a/sa/b",
            "https://td/ns/a/sa/b",
            "spiffe:///ns/a/sa/b",
            "spiffe://t%64/ns/a/sa/b",
            "spiffe://td/ns/%61/sa/b",
            "spiffe://td/ns/a/sa/b\0",
            "spiffe://тд/ns/a/sa/b",
            "spiffe://*/ns/a/sa/b",
            "",
            &long,
        ];
        for uri in bad {
            assert_eq!(parse_identity(uri), None, "{uri:?}");
        }
        assert_eq!(
            parse_identity("spiffe://east.local/ns/a_b/sa/c.d"),
            Some(["east.local", "a_b", "c.d"])
        );
    }
}
