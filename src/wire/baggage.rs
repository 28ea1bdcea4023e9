//! Parser of the `baggage` header (W3C Baggage), which names the source of a tunnel in Istio.

const CLUSTER: &[u8] = b"k8s.cluster.name";

/// Returns the first cluster in the values of the header that is not empty. The result is only a
/// hint, because the client sets the header.
pub fn source_cluster<'a>(values: impl IntoIterator<Item = &'a [u8]>) -> Option<&'a [u8]> {
    values.into_iter().flat_map(|value| value.split(is_byte(b','))).find_map(|member| {
        let mut parts = member.splitn(2, is_byte(b'='));
        let (key, value) = (parts.next()?, parts.next()?);
        // Properties may follow the value.
        let value = value.split(is_byte(b';')).next()?.trim_ascii();
        (key.trim_ascii() == CLUSTER && !value.is_empty()).then_some(value)
    })
}

fn is_byte(wanted: u8) -> impl Fn(&u8) -> bool {
    move |byte| *byte == wanted
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cluster_is_the_first_one_that_is_named() {
        for (values, want) in [
            (&[][..], None),
            (&["k8s.cluster.name=west,k8s.namespace.name=shop"], Some("west")),
            (&["service.name=a, k8s.cluster.name = west ;p=1 , x=y"], Some("west")),
            (&["k8s.cluster.name=", "k8s.cluster.name=west"], Some("west")),
            (&["k8s.cluster.name=a=b,k8s.cluster.name=west"], Some("a=b")),
            (&["k8s.cluster.name", "xk8s.cluster.name=west"], None),
            (&["K8s.Cluster.Name=west,,;=,"], None),
        ] {
            let values = values.iter().map(|value| value.as_bytes());
            assert_eq!(source_cluster(values), want.map(str::as_bytes), "{want:?}");
        }
    }
}
