//! Conversion of OpenMetrics text to the Prometheus text format 0.0.4.
//!
//! prometheus-client writes OpenMetrics only; scrapers that do not request it expect 0.0.4.
//! There, a counter is declared under the name of its samples, `x_total`, and `# UNIT` and `#
//! EOF` do not exist. After `# TYPE x counter` such a scraper treats each `x_total` as a metric
//! without a type.

/// Converts OpenMetrics text to plain text, line by line.
///
/// Label values contain no line break, because the encoder escapes it.
pub(super) fn plain(openmetrics: &str) -> String {
    let mut out = String::with_capacity(openmetrics.len());
    // HELP precedes TYPE, but only TYPE determines the name of both.
    let mut help = None;
    for line in openmetrics.lines() {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            help = rest.split_once(' ').map(|(_, text)| text);
        } else if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').unwrap_or((rest, "unknown"));
            let (suffix, kind) = match kind {
                "counter" => ("_total", "counter"),
                "info" => ("_info", "gauge"),
                "unknown" => ("", "untyped"),
                other => ("", other),
            };
            if let Some(text) = help.take() {
                push(&mut out, &["# HELP ", name, suffix, " ", text]);
            }
            push(&mut out, &["# TYPE ", name, suffix, " ", kind]);
        } else if !line.starts_with('#') {
            push(&mut out, &[line]);
        }
    }
    out
}

fn push(out: &mut String, parts: &[&str]) {
    out.extend(parts.iter().copied());
    out.push('\n');
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_counter_is_declared_under_the_name_of_its_samples() {
        let openmetrics = "# HELP x Things.\n# TYPE x counter\nx_total{a=\"# EOF\"} 1\n# EOF\n";
        let expected = "# HELP x_total Things.\n# TYPE x_total counter\nx_total{a=\"# EOF\"} 1\n";
        assert_eq!(plain(openmetrics), expected);
    }

    #[test]
    fn other_kinds_keep_their_name_and_units_are_left_out() {
        let openmetrics = "# HELP h_seconds Time.\n# TYPE h_seconds histogram\n\
                           # UNIT h_seconds seconds\nh_seconds_sum 0.5\n\
                           # HELP v Build.\n# TYPE v info\nv_info{a=\"b\"} 1\n# EOF\n";
        let expected = "# HELP h_seconds Time.\n# TYPE h_seconds histogram\nh_seconds_sum 0.5\n\
                        # HELP v_info Build.\n# TYPE v_info gauge\nv_info{a=\"b\"} 1\n";
        assert_eq!(plain(openmetrics), expected);
    }
}
